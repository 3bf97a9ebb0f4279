"""Calibrates times of blocks that were run alone to the times that they have in a step.

Alone, a block is timed on a device that is cool and kept busy, device and host apart. In a step it
follows other blocks, the device may be hot, and the host has all that it needs in its caches. So
the times of each distinct block are scaled to those that it had in a step with every block
recomputed; the times outside the blocks are what is missing to the time of that step.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from rekindle.planner.candidates import recomputing_all
from rekindle.planner.ranks.worst_case import places_in
from rekindle.planner.timeline import Timeline, simulate
from rekindle.planner.types import BlockSpans, Candidate, Profile

_MOST = 3.0
"""How many times as long a block may take in a step as alone: what takes longer was held up by
something else."""
_ROUNDS = 4
"""Rounds in which the time outside the blocks is found."""


def calibrate_to_spans(profile: Profile, order: Sequence[str], spans: BlockSpans) -> Profile:
    """Return the profile, with blocks that take as long as they did in a step.

    First the host: it is no slower than it was in the step. It may have been faster there than the
    step shows, if it had to wait for the device. Then both, to the time that passed.

    Args:
        profile: the profile, without the time outside its blocks.
        order: the blocks of the step that was timed, each of which was recomputed.
        spans: their times in it.
    """
    profile = replace(profile, rest_host_seconds=spans.host_outside)
    indices = [index for _, index in profile.order]
    places = places_in(order, [path for path, _ in profile.order])
    alone = recomputing_all(profile)
    host = (
        _factors(
            indices, places, [each.forward_host_seconds for each in alone], spans.forward_host
        ),
        _factors(
            indices, places, [each.backward_host_seconds for each in alone], spans.backward_host
        ),
    )
    profile = _with_factors(
        profile,
        lambda index: [min(of_block.get(index, 1.0), 1.0) for of_block in host],
        _host_scaled,
    )
    outside = with_step_time(profile, sum(spans.forward) + sum(spans.backward))
    timeline = Timeline(outside)
    forward, backward = timeline.spans(timeline.terms_of(recomputing_all(profile)))
    both = (
        _factors(indices, places, forward, spans.forward),
        _factors(indices, places, backward, spans.backward),
    )
    return _with_factors(
        profile, lambda index: [of_block.get(index, 1.0) for of_block in both], _scaled
    )


def _with_factors(
    profile: Profile,
    factors: Callable[[int], list[float]],
    scaled: Callable[..., Candidate],
) -> Profile:
    """Return the profile with all candidates scaled by the factors of their block."""
    blocks = (
        replace(block, candidates=tuple(scaled(each, *factors(i)) for each in block.candidates))
        for i, block in enumerate(profile.blocks)
    )
    return replace(profile, blocks=tuple(blocks))


def with_step_time(profile: Profile, seconds: float) -> Profile:
    """Return the profile, whose step takes some seconds with every block recomputed.

    What its blocks do not take is outside of them. While the device is busy there, the host runs
    ahead, and blocks may wait for it less: so the time outside is found in a few rounds.
    """
    candidates = recomputing_all(profile)
    for _ in range(_ROUNDS):
        missing = seconds - simulate(profile, candidates).seconds
        if abs(missing) <= _NOTHING * seconds:
            break
        profile = replace(profile, rest_seconds=max(profile.rest_seconds + missing, 0.0))
    return profile


_NOTHING = 1e-9
"""A share of a step that is a rounding."""


def _factors(
    indices: Sequence[int],
    places: Sequence[int | None],
    simulated: Sequence[float],
    in_step: Sequence[float],
) -> dict[int, float]:
    """Return how many times as long each distinct block took in a step, by its index."""
    predicted, measured = defaultdict[int, float](float), defaultdict[int, float](float)
    for index, place, seconds in zip(indices, places, simulated, strict=True):
        if place is not None and in_step:
            predicted[index] += seconds
            measured[index] += in_step[place]
    return {
        index: min(measured[index] / seconds, _MOST)
        for index, seconds in predicted.items()
        if seconds and measured[index]
    }


def _host_scaled(candidate: Candidate, forward: float, backward: float) -> Candidate:
    """Return a candidate with other times of the host."""
    return replace(
        candidate,
        forward_host_seconds=candidate.forward_host_seconds * forward,
        backward_host_seconds=candidate.backward_host_seconds * backward,
    )


def _scaled(candidate: Candidate, forward: float, backward: float) -> Candidate:
    """Return a candidate with other times, of the device and of the host."""
    return replace(
        _host_scaled(candidate, forward, backward),
        forward_seconds=candidate.forward_seconds * forward,
        backward_seconds=candidate.backward_seconds * backward,
    )
