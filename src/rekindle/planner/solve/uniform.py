"""Uniform plans, the floor of every plan: one treatment for the first blocks, the others kept.

A user without a planner would write one of these: keep all, recompute all, recompute k of n blocks,
one policy everywhere, each without offload or with. They are cheap to evaluate, so the solver never
returns a choice that is predicted to be slower than the best of them that fits.
"""

from rekindle.planner.solve.milp import solution_of
from rekindle.planner.timeline import Timeline
from rekindle.planner.treatments import keeping, treatments
from rekindle.planner.types import Solution


def best_uniform(timeline: Timeline, budget: int) -> Solution | None:
    """The fastest uniform choice within a budget; None if none fits.

    Of each treatment as few blocks have it as the budget allows. They are the first ones of the
    forward: the backward of the others comes first, and frees what they keep.
    """
    found = [
        solution
        for treatment in treatments(timeline.profile)
        if (solution := _fewest(timeline, treatment, budget)) is not None
    ]
    return min(found, key=lambda solution: solution.prediction.seconds, default=None)


def _fewest(timeline: Timeline, treatment: list[int], budget: int) -> Solution | None:
    """The choice that gives the treatment to as few blocks as fit the budget, by bisection."""
    keep = keeping(timeline.profile)
    paths = [path for path, _ in timeline.profile.order]
    order = {path: i for i, path in enumerate(dict.fromkeys(paths))}

    def solution(count: int) -> Solution:
        indices = [treatment[i] if order[path] < count else keep[i] for i, path in enumerate(paths)]
        return solution_of(timeline, indices, 1.0)

    low, high = 0, len(order)
    found = solution(high)
    if found.prediction.peak > budget:
        return None
    while low < high:
        middle = (low + high) // 2
        tried = solution(middle)
        if tried.prediction.peak <= budget:
            found, high = tried, middle
        else:
            low = middle + 1
    return found
