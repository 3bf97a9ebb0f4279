"""Calibrates times of blocks that were run alone to the times that they have in a step.

Alone, a block is timed on a device that is cool and kept busy, device and host apart. In a step it
follows other blocks, the device may be hot, and the host has all that it needs in its caches. So
the times of each distinct block are scaled to those that it had in a step with every block
recomputed; the times outside the blocks are what is missing to the time of that step. Candidates
that go op by op keep the host busier: they are scaled once more, to a step in which some do.

First the host is scaled: it is no slower than it was in the step. It may have been faster there
than the step shows, if it had to wait for the device. Then host and device are, to the time that
passed.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rekindle.planner.candidates import recomputing_all
from rekindle.planner.measure.correct_times import no_faster_than
from rekindle.planner.ranks.rank_sync import all_gather
from rekindle.planner.ranks.worst_case import places_in
from rekindle.planner.timeline import Timeline, simulate
from rekindle.planner.types import BlockSpans, Candidate, Profile
from rekindle.strategy import Keep, Selective

_MOST = 3.0
"""How many times as long a block may take in a step as alone: what takes longer was held up by
something else."""
_ROUNDS = 4
"""Rounds in which the time outside the blocks is found."""
IsMeant = Callable[[Candidate], bool]
"""Returns whether the times of a candidate are scaled."""


def calibrate_to_recomputing(profile: Profile, order: Sequence[str], spans: BlockSpans) -> Profile:
    """Return the profile, with blocks that take as long as they did when each was recomputed.

    Args:
        profile: the profile, without the time outside its blocks.
        order: the blocks of the step that was timed.
        spans: their times in it.
    """
    profile = replace(profile, rest_host_seconds=spans.host_outside)
    seconds = sum(spans.forward) + sum(spans.backward)
    step = _TimedStep(profile, recomputing_all(profile), order, spans)
    profile = _host_scaled(profile, step.host_factors(profile))
    return _scaled(profile, step.factors(with_step_time(profile, seconds)))


def calibrate_op_by_op(
    profile: Profile, candidates: Sequence[Candidate], order: Sequence[str], spans: BlockSpans
) -> Profile:
    """Return the profile, with candidates that go op by op as fast as some of them were in a step.

    Ranks call it together, and the slowest counts.

    Args:
        profile: the profile.
        candidates: those that ran in the step, at the profile's places.
        order: the blocks of this rank's step.
        spans: their times in it.
    """
    step = _TimedStep(profile, candidates, order, spans, _goes_op_by_op)
    profile = _host_scaled(profile, _worst_of_ranks(step.host_factors(profile)), _goes_op_by_op)
    profile = _scaled(profile, _worst_of_ranks(step.factors(profile)), _goes_op_by_op)
    blocks = (
        replace(block, candidates=tuple(no_faster_than(keep, each) for each in block.candidates))
        for block in profile.blocks
        for keep in block.candidates
        if keep.strategy == Keep()
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


def _every(_candidate: Candidate) -> bool:
    return True


def _goes_op_by_op(candidate: Candidate) -> bool:
    return isinstance(candidate.strategy, Selective)


@dataclass(frozen=True)
class _Factors:
    """How many times as long blocks took in a step, by the index of the distinct block."""

    forward: dict[int, float]
    backward: dict[int, float]

    def of(self, index: int) -> tuple[float, float]:
        return self.forward.get(index, 1.0), self.backward.get(index, 1.0)


class _TimedStep:
    """A step that was timed, at the places of a profile."""

    def __init__(
        self,
        profile: Profile,
        candidates: Sequence[Candidate],
        order: Sequence[str],
        spans: BlockSpans,
        is_meant: IsMeant = _every,
    ) -> None:
        self._chosen = [
            profile.candidates(i).index(candidate) for i, candidate in enumerate(candidates)
        ]
        places = places_in(order, [path for path, _ in profile.order])
        self._places = [
            place if is_meant(candidate) else None
            for place, candidate in zip(places, candidates, strict=True)
        ]
        """The place in the step of each block that counts; None of others."""
        self._spans = spans

    def host_factors(self, profile: Profile) -> _Factors:
        """Return how the host's times compare with those of the blocks alone; 1 at most."""
        spans, candidates = self._spans, self._candidates(profile)
        return _Factors(
            self._compared(
                profile,
                [each.forward_host_seconds for each in candidates],
                spans.forward_host,
                most=1.0,
            ),
            self._compared(
                profile,
                [each.backward_host_seconds for each in candidates],
                spans.backward_host,
                most=1.0,
            ),
        )

    def factors(self, profile: Profile) -> _Factors:
        """Return how the times that passed compare with those of the timeline."""
        timeline = Timeline(profile)
        forward, backward = timeline.spans(timeline.terms_of(self._candidates(profile)))
        return _Factors(
            self._compared(profile, forward, self._spans.forward),
            self._compared(profile, backward, self._spans.backward),
        )

    def _candidates(self, profile: Profile) -> list[Candidate]:
        return [profile.candidates(i)[k] for i, k in enumerate(self._chosen)]

    def _compared(
        self,
        profile: Profile,
        predicted: Sequence[float],
        in_step: Sequence[float],
        most: float = _MOST,
    ) -> dict[int, float]:
        alone, together = defaultdict[int, float](float), defaultdict[int, float](float)
        for (_, index), place, seconds in zip(profile.order, self._places, predicted, strict=True):
            if place is not None and in_step:
                alone[index] += seconds
                together[index] += in_step[place]
        return {
            index: min(together[index] / seconds, most)
            for index, seconds in alone.items()
            if seconds and together[index]
        }


def _worst_of_ranks(factors: _Factors) -> _Factors:
    """Return the largest factors of all ranks."""

    def worst(of_ranks: list[dict[int, float]]) -> dict[int, float]:
        indices = {index for of_blocks in of_ranks for index in of_blocks}
        return {i: max(each[i] for each in of_ranks if i in each) for i in indices}

    every = all_gather(factors)
    return _Factors(worst([each.forward for each in every]), worst([e.backward for e in every]))


def _host_scaled(profile: Profile, factors: _Factors, is_meant: IsMeant = _every) -> Profile:
    """Return the profile with other times of the host."""

    def scaled(candidate: Candidate, forward: float, backward: float) -> Candidate:
        return replace(
            candidate,
            forward_host_seconds=candidate.forward_host_seconds * forward,
            backward_host_seconds=candidate.backward_host_seconds * backward,
        )

    return _changed(profile, factors, is_meant, scaled)


def _scaled(profile: Profile, factors: _Factors, is_meant: IsMeant = _every) -> Profile:
    """Return the profile with other times, of the device and of the host."""

    def scaled(candidate: Candidate, forward: float, backward: float) -> Candidate:
        return replace(
            candidate,
            forward_seconds=candidate.forward_seconds * forward,
            backward_seconds=candidate.backward_seconds * backward,
        )

    profile = _changed(profile, factors, is_meant, scaled)
    return _host_scaled(profile, factors, is_meant)


def _changed(
    profile: Profile,
    factors: _Factors,
    is_meant: IsMeant,
    change: Callable[[Candidate, float, float], Candidate],
) -> Profile:
    blocks = (
        replace(
            block,
            candidates=tuple(
                change(each, *factors.of(index)) if is_meant(each) else each
                for each in block.candidates
            ),
        )
        for index, block in enumerate(profile.blocks)
    )
    return replace(profile, blocks=tuple(blocks))
