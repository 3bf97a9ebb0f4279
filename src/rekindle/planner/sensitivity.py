"""The time of a step within a little less memory, and within a little more.

A tenth of what the activations have. Where all blocks are alike and nothing moves it is solved
for; elsewhere the plan itself is changed by a local search: that fits, and is close to the best.
"""

from dataclasses import replace

from rekindle.planner.solve import solver
from rekindle.planner.solve.local_search import local_search
from rekindle.planner.timeline import Timeline
from rekindle.planner.types import Nearby, Profile, Solution

_SHARE = 10
_MAX_BLOCK_EVALUATIONS = 50_000
"""Blocks that are evaluated for each of the two, less than a tenth of a second."""


def nearby(
    profile: Profile, budget: int, solution: Solution
) -> tuple[Nearby | None, Nearby | None]:
    """A step within less memory, and within more, than one by a choice for this budget."""
    now = solution.prediction
    used = min(budget, now.peak)  # of a budget with room to spare, less costs nothing
    part = max((used - profile.static_bytes) // _SHARE, 1)
    less = _within(profile, used - part, solution)
    if less is not None and less.seconds is not None:
        less = replace(less, seconds=max(less.seconds, now.seconds))
    more = _within(profile, budget + part, solution)
    if more is not None:  # what fits now fits then
        more = replace(more, seconds=min(more.seconds or now.seconds, now.seconds))
    return less, more


def _within(profile: Profile, limit: int, solution: Solution) -> Nearby | None:
    """A step within a limit; None if it is not known."""
    if _are_alike(profile) and not solver.moves(profile):
        found = solver.choose(profile, limit)
        return Nearby(limit, None if found is None else found.prediction.seconds)
    timeline = Timeline(profile.with_heads(solution.heads))
    changed = local_search(timeline, [solution], limit, _MAX_BLOCK_EVALUATIONS).prediction
    return Nearby(limit, changed.seconds) if changed.peak <= limit else None


def _are_alike(profile: Profile) -> bool:
    """Returns whether all blocks are of one kind, and each is called once: quick to solve for."""
    paths = {path for path, _ in profile.order}
    return len(profile.blocks) == 1 and len(paths) == len(profile.order)
