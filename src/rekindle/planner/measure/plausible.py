"""Times that cannot be are measured again, and then taken to be the least that can.

Every candidate of a block runs all that the plain block runs, and more. One that was measured to be
faster met a quick moment, or the plain block a slow one. Then all of its candidates are timed
again, in turns, so that a slow moment meets all of them; what is impossible still is raised to the
plain block's time. So no plan is predicted to be faster than no plan.
"""

from collections.abc import Callable
from dataclasses import replace

from rekindle.planner.ranks.rank_sync import all_gather
from rekindle.planner.types import Candidate

TimeAgain = Callable[[list[Candidate]], list[Candidate]]
"""Times candidates once more, in turns: the same candidates with the least that was seen."""


def plausible(candidates: list[Candidate], time_again: TimeAgain) -> list[Candidate]:
    """A block's candidates, of which the first keeps all, with times that can be.

    All ranks time theirs again if one has to. A rank that has not run the block has no candidates.
    """
    is_odd = any(_is_too_fast(candidate, candidates[0]) for candidate in candidates)
    if any(all_gather(is_odd)) and candidates:
        candidates = time_again(candidates)
    return [at_least(candidate, candidates[0]) for candidate in candidates]


def _is_too_fast(candidate: Candidate, keep: Candidate) -> bool:
    """Whether an candidate takes less than the plain block, by more than both were uncertain."""
    noise = candidate.seconds_noise + keep.seconds_noise
    device = keep.forward_seconds + keep.backward_seconds
    host = keep.forward_host_seconds + keep.backward_host_seconds
    return (
        candidate.forward_seconds + candidate.backward_seconds < device - noise
        or candidate.forward_host_seconds + candidate.backward_host_seconds < host - noise
    )


def at_least(candidate: Candidate, keep: Candidate) -> Candidate:
    """An candidate with the plain block's times where its own are less."""
    return replace(
        candidate,
        forward_seconds=max(candidate.forward_seconds, keep.forward_seconds),
        backward_seconds=max(candidate.backward_seconds, keep.backward_seconds),
        forward_host_seconds=max(candidate.forward_host_seconds, keep.forward_host_seconds),
        backward_host_seconds=max(candidate.backward_host_seconds, keep.backward_host_seconds),
    )
