"""A step by one choice of candidates, moment by moment: what pages and snapshots draw.

The moments are those of the timeline, which logs them as it evaluates the choice: nothing is
predicted here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from rekindle.planner.step_log import MemoryAt, StepLog
from rekindle.planner.timeline import OUTSIDE_BLOCKS, Moment, Timeline
from rekindle.planner.types import Candidate

Phase: TypeAlias = Literal["forward", "loss", "backward"]


class StepMoment(NamedTuple):
    """One moment of a step: the seconds that it lasts, and the memory at its highest point."""

    at: str
    phase: Phase
    place: int | None
    """The place of the block that runs; None outside the blocks."""
    begin: float
    end: float
    memory: MemoryAt
    """Bytes above those that are there all the time."""


class Copy(NamedTuple):
    """One block's results on the link."""

    place: int
    is_out: bool
    begin: float
    end: float


@dataclass(frozen=True)
class StepWalk:
    """The moments of a step in their order, and what the link copies meanwhile."""

    moments: tuple[StepMoment, ...]
    copies: tuple[Copy, ...]
    peak: int
    """Bytes on the device at the highest moment."""
    seconds: float
    peak_moment: int
    """Index of the highest moment."""


def walk_step(timeline: Timeline, candidates: Sequence[Candidate]) -> StepWalk:
    """Return the moments of a step by one candidate at each place."""
    log, choice = StepLog(), timeline.terms_of(candidates)
    found = timeline.evaluate(choice, log)
    copies = [Copy(i, True, *times) for i, times in log.copies_out.items()]
    copies += [Copy(i, False, *times) for i, times in reversed(log.copies_back.items())]
    # The timeline has two moments of the head and the loss, of which the log has the higher one.
    after_rest = found.moment > timeline.count + 1
    return StepWalk(
        tuple(_moments(timeline, log, found.seconds)),
        tuple(copies),
        timeline.base + found.peak,
        found.seconds,
        found.moment - 1 if after_rest else found.moment,
    )


def _moments(timeline: Timeline, log: StepLog, seconds: float) -> Iterator[StepMoment]:
    """Yield the moments in their order: before the blocks, forwards, loss, backwards, after."""
    names, count = [moment.at for moment in timeline.moments], timeline.count
    before = timeline.profile.before_bytes

    def at_once(moment: Moment, phase: Phase, time: float) -> StepMoment:
        memory = MemoryAt(0, 0, 0, 0, moment.constant)
        return StepMoment(moment.at, phase, None, time, time, _above_static(memory, before))

    yield at_once(timeline.moments[0], "forward", 0.0)
    begin = 0.0
    for i, end in enumerate(log.forward_ends):
        memory = _above_static(log.forward[i], before)
        yield StepMoment(names[1 + i], "forward", i, begin, end, memory)
        begin = end
    begins, ends = log.backward_begins, log.backward_ends
    assert log.rest is not None, "a step that was walked has one"
    memory = _above_static(log.rest, before)
    yield StepMoment(OUTSIDE_BLOCKS, "loss", None, begin, begins[-1], memory)
    for i in range(count - 1, -1, -1):
        memory = _above_static(log.backward[i], before)
        yield StepMoment(names[2 * count + 2 - i], "backward", i, begins[i], ends[i], memory)
    yield at_once(timeline.moments[-1], "backward", seconds)


def _above_static(memory: MemoryAt, before: int) -> MemoryAt:
    """The causes with the bytes from before the first block, none of them below 0 but the first.

    A block that frees its input frees bytes that were made outside the blocks.
    """
    outside, *others = memory
    freed = sum(min(each, 0) for each in others)
    return MemoryAt(outside + before + freed, *(max(each, 0) for each in others))
