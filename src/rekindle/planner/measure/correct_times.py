"""Corrects measured times that cannot be.

The host is timed a few times only, so its times vary most. But a candidate that goes by saved
indices has it do no more than one that recomputes all; those that go op by op do the same in the
forward; and of these, one whose backward replays less has no more to do there.

Every candidate of a block runs all that the plain block runs, and more. A candidate that was
measured to be faster ran at a quick moment, or the plain block at a slow one. Then these are timed
again, one after the other, so that a slow moment meets both; a time that is still too short is
raised to the plain block's. So no plan is predicted to be faster than no plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rekindle.planner.ranks.rank_sync import all_gather
from rekindle.planner.types import Candidate
from rekindle.strategy import Recompute, SavedIndices, Selective

TimeAgain = Callable[[list[Candidate]], list[Candidate]]
"""Times candidates once more, and returns them with the shortest times so far."""


def correct_times(candidates: list[Candidate], time_again: TimeAgain) -> list[Candidate]:
    """Return a block's candidates, of which the first keeps all, with times that can be.

    Ranks call it together, and time the same ones again. A rank that has not run the block has no
    candidates.
    """
    odd = {i for i, each in enumerate(candidates) if _is_too_fast(each, candidates[0])}
    of_ranks = set[int]().union(*all_gather(odd))
    if of_ranks and candidates:
        places = sorted({0, *of_ranks})
        again = time_again([candidates[place] for place in places])
        candidates = list(candidates)
        for place, candidate in zip(places, again, strict=True):
            candidates[place] = candidate
    return [no_faster_than(candidates[0], each) for each in with_plausible_hosts(candidates)]


def with_plausible_hosts(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return a block's candidates with times of the host that are not above what they can be."""
    found = []
    for candidate in candidates:
        forward, backward = _at_most(candidate, candidates)
        found.append(
            replace(
                candidate,
                forward_host_seconds=min(e.forward_host_seconds for e in (candidate, *forward)),
                backward_host_seconds=min(e.backward_host_seconds for e in (candidate, *backward)),
            )
        )
    return found


def _at_most(
    candidate: Candidate, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the candidates whose host has no less to do, in the forward and in the backward."""
    match candidate.strategy:
        case SavedIndices():
            forward = backward = [each for each in candidates if each.strategy == Recompute()]
        case Selective():
            forward = [each for each in candidates if isinstance(each.strategy, Selective)]
            backward = [each for each in forward if each.bytes_held <= candidate.bytes_held]
        case _:
            forward = backward = []
    return forward, backward


def _is_too_fast(candidate: Candidate, keep: Candidate) -> bool:
    """Return whether a candidate is faster than the plain block, by more than both are noisy."""
    noise = candidate.seconds_noise + keep.seconds_noise
    device = keep.forward_seconds + keep.backward_seconds
    host = keep.forward_host_seconds + keep.backward_host_seconds
    return (
        candidate.forward_seconds + candidate.backward_seconds < device - noise
        or candidate.forward_host_seconds + candidate.backward_host_seconds < host - noise
    )


def no_faster_than(keep: Candidate, candidate: Candidate) -> Candidate:
    """Return a candidate with the plain block's times where its own are shorter."""
    return replace(
        candidate,
        forward_seconds=max(candidate.forward_seconds, keep.forward_seconds),
        backward_seconds=max(candidate.backward_seconds, keep.backward_seconds),
        forward_host_seconds=max(candidate.forward_host_seconds, keep.forward_host_seconds),
        backward_host_seconds=max(candidate.backward_host_seconds, keep.backward_host_seconds),
    )
