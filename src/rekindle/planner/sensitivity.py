"""What a little less memory would cost in time, and what a little more would save.

A tenth of what the activations have. Where all blocks are alike and nothing moves that is solved;
elsewhere the plan itself is changed step by step: that fits, and is close to the best.
"""

from dataclasses import replace

from rekindle.planner.solve import solver
from rekindle.planner.types import Candidate, Nearby, Prediction, Profile, Solution

_SHARE = 10
_LOOKS = 50_000
"""Blocks that are looked at for each of the two, less than a tenth of a second."""


def nearby(
    profile: Profile, budget: int, candidates: tuple[Candidate, ...], now: Prediction
) -> tuple[Nearby | None, Nearby | None]:
    """A step with less memory and with more than one by these candidates, made for this budget."""
    used = min(budget, now.peak)  # of a budget with room to spare, less costs nothing
    part = max((used - profile.static_bytes) // _SHARE, 1)
    choice = Solution(candidates, now, 0.0)
    less = _within(profile, used - part, choice)
    if less is not None and less.seconds is not None:
        less = replace(less, seconds=max(less.seconds, now.seconds))
    more = _within(profile, budget + part, choice)
    if more is not None:  # what fits now fits then
        more = replace(more, seconds=min(more.seconds or now.seconds, now.seconds))
    return less, more


def _within(profile: Profile, limit: int, choice: Solution) -> Nearby | None:
    """A step within a limit; None if it is not known."""
    if solver.counts(profile) and not solver.moves(profile):
        found = solver.choose(profile, limit)
        return Nearby(limit, None if found is None else found.prediction.seconds)
    changed = solver.improved(profile, choice, limit, _LOOKS).prediction
    return Nearby(limit, changed.seconds) if changed.peak <= limit else None
