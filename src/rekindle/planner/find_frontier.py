"""Finds the frontier of a profile: plans from the plain peak down to the smallest that works."""

from collections.abc import Iterator
from dataclasses import replace

from rekindle.planner.frontier import Frontier, Point
from rekindle.planner.plan import Plan
from rekindle.planner.plan_for_budget import plain_prediction, solved
from rekindle.planner.progress import count_progress, report_progress
from rekindle.planner.ranks.rank_sync import on_first_rank
from rekindle.planner.types import Nearby, Profile


def find_frontier(profile: Profile, points: int) -> Frontier:
    """Solve for budgets at even distances in memory; return the plans that are worth having.

    The first point has the highest peak and takes the least time. Plans that are alike are one.
    """
    plans = list(_plans_down(profile, points))
    found = [
        Point(plan.predicted_peak, plan.predicted_time, plan)
        for i, plan in enumerate(plans)
        if all(plan.predicted_time <= less.predicted_time for less in plans[i + 1 :])
    ]
    near = [None, *(Nearby(point.peak, point.seconds) for point in found), None]
    return Frontier(
        tuple(
            replace(point, plan=replace(point.plan, more=more, less=less))
            for point, more, less in zip(found, near, near[2:], strict=False)
        )
    )


def _plans_down(profile: Profile, points: int) -> Iterator[Plan]:
    """Yield the plans for smaller and smaller budgets whose peak is lower than the one before."""
    from rekindle.planner.solve import solver  # noqa: PLC0415

    report_progress("smallest peak")
    highest = plain_prediction(profile).peak
    least = on_first_rank(lambda: solver.least_peak(profile).prediction.peak)
    last: int | None = None
    for i in count_progress(range(points), "point"):
        budget = highest - (highest - least) * i // max(points - 1, 1)
        plan = solved(profile, max(budget, least))
        if last is None or plan.predicted_peak < last:
            last = plan.predicted_peak
            yield plan
