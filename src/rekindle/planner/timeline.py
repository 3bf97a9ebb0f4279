"""The timeline of a training step: the one model of its memory and time.

A step is a row of moments: before the blocks, the forward of each block, the head and the loss, the
backward of each block, and after them. Memory at each moment is a sum over the blocks' candidates,
and `Timeline.moments` has these sums as they are: the integer program takes them for its rows.
`Timeline.evaluate` walks the same moments with numbers, and adds what is no sum: results that are
being copied out or back, and who waits for whom among host, device and link.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from rekindle.planner.step_log import MemoryAt, StepLog
from rekindle.planner.types import Candidate, Prediction, Profile

_BEYOND_ANY_BUDGET = 2**60
OUTSIDE_BLOCKS = "the head and the loss"
"""The place of a peak between the last block's forward and its backward."""


class Terms(NamedTuple):
    """One candidate at one place of the forward: what it adds to the moments of the step."""

    left: int
    """Bytes that its forward leaves on the device, without those of its input that it frees."""
    cached: int
    """Bytes of casts that its forward leaves in autocast's cache alone."""
    waiting: int
    """Bytes that its backward adds to gradients of casts that wait for other calls of the block."""
    forward_peak: int
    backward_peak: int
    moved: int
    largest_moved: int
    forward_seconds: float
    forward_host_seconds: float
    backward_seconds: float
    backward_host_seconds: float


@dataclass(frozen=True)
class Moment:
    """A moment at which memory may peak, as a sum; bytes are above those before the first block.

    The sum: `constant`, what the forwards of blocks before `left_until` left, casts that the blocks
    of `cached` have in autocast's cache, gradients of casts that wait from blocks from
    `waiting_from` on, and a peak of the block at `place`.
    """

    at: str
    constant: int
    left_until: int = 0
    cached: range = range(0)
    waiting_from: int | None = None
    place: int | None = None
    peak: Literal["forward_peak", "backward_peak"] | None = None


@dataclass(frozen=True)
class Evaluation:
    """The peak and time of a step: bytes above those before the first block, and seconds."""

    peak: int
    seconds: float
    moment: int
    """Index of the moment of the peak."""


class Timeline:
    """A profile's step, evaluated for any choice of candidates.

    Where a block is called more than once, its calls have one candidate; autocast casts its weights
    once, until the cache is emptied: Note [How long casts live] in cast_cache.py.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.count = count = len(profile.order)
        self.base = profile.static_bytes + profile.before_bytes
        """Bytes on the device before the first block."""
        between, total = profile.between or (0,) * count, 0
        self._between: list[int] = []
        """Bytes made outside the blocks so far, at each place."""
        for nbytes in between:
            total += nbytes
            self._between.append(total)
        waiting = profile.waiting or (0,) * count
        self.waiting = [profile.output_held + nbytes for nbytes in waiting]
        """Bytes in each block's backward that no block holds."""
        self._epoch_starts = self._starts_of_epochs()
        self.is_repeated, waits = self._repeated_calls()
        """True at the places of a block that was called before, with its weights still cast."""
        self.terms = [
            [self._terms(i, candidate, waits[i]) for candidate in profile.candidates(i)]
            for i in range(count)
        ]
        """The terms of each candidate at each place."""
        self.moments = self._moments()

    def _starts_of_epochs(self) -> list[int]:
        """At each place, the first one since autocast's cache was emptied."""
        epochs, starts = self.profile.cast_epochs, list[int]()
        for i, epoch in enumerate(epochs):
            starts.append(i if not i or epoch != epochs[i - 1] else starts[-1])
        return starts or [0] * self.count

    def _repeated_calls(self) -> tuple[list[bool], list[int]]:
        """Calls with weights that are cast already; and +1 at the last of several, -1 at the first.

        One cast has one gradient, so that of a block's last call waits for its first.
        """
        repeated, waits = [False] * self.count, [0] * self.count
        if not self.profile.cast_epochs:
            return repeated, waits
        calls: dict[tuple[str, int], list[int]] = {}
        for i, (path, _) in enumerate(self.profile.order):
            calls.setdefault((path, self._epoch_starts[i]), []).append(i)
        for first, *others in calls.values():
            for i in others:
                repeated[i] = True
            if others:
                waits[first], waits[others[-1]] = -1, 1
        return repeated, waits

    def _terms(self, place: int, candidate: Candidate, waits: int) -> Terms:
        profile, repeated = self.profile, self.is_repeated[place]
        freed = min(profile.passed[place], candidate.input_freed) if profile.passed else 0
        cached = candidate.casts_cached if profile.cast_epochs and not repeated else 0
        return Terms(
            candidate.bytes_held - freed - (candidate.casts_held if repeated else 0),
            cached,
            waits * (candidate.casts_cached + candidate.casts_held),
            candidate.forward_peak,
            candidate.backward_peak,
            candidate.bytes_moved,
            candidate.largest_moved,
            candidate.forward_seconds,
            candidate.forward_host_seconds,
            candidate.backward_seconds,
            candidate.backward_host_seconds,
        )

    def _moments(self) -> list[Moment]:
        """The moments in their order, as long as nothing moves."""
        profile, last = self.profile, self.count - 1
        paths = [path or "the model" for path, _ in profile.order]
        after_all = range(self._epoch_starts[last], self.count)
        in_backward = after_all if profile.casts_in_backward else range(0)
        made, head = self._between, OUTSIDE_BLOCKS
        forwards = [
            Moment(
                f"the forward of {path}",
                *(made[i], i, range(self._epoch_starts[i], i)),
                place=i,
                peak="forward_peak",
            )
            for i, path in enumerate(paths)
        ]
        backwards = [
            Moment(
                f"the backward of {paths[i]}",
                *(made[i] + self.waiting[i], i + 1, in_backward, i + 1),
                place=i,
                peak="backward_peak",
            )
            for i in range(last, -1, -1)
        ]
        return [
            Moment("the forward before the blocks", profile.first_peak - profile.before_bytes),
            *forwards,
            Moment(head, made[last] + profile.cached_rest_peak, self.count, after_all),
            Moment(head, made[last] + profile.rest_peak, self.count, in_backward),
            *backwards,
            Moment("the backward after the blocks", profile.last_peak - profile.before_bytes),
        ]

    def predict(self, indices: Sequence[int]) -> Prediction:
        """The peak and time of a step by the candidates with these indices."""
        found = self.evaluate([self.terms[i][k] for i, k in enumerate(indices)])
        return self._prediction(found)

    def predict_candidates(self, candidates: Sequence[Candidate]) -> Prediction:
        """The peak and time of a step by these candidates, which need not be the profile's."""
        return self._prediction(self.evaluate(self.terms_of(candidates)))

    def terms_of(self, candidates: Sequence[Candidate]) -> list[Terms]:
        """The terms of one candidate at each place, which need not be the profile's."""
        waits = self._repeated_calls()[1]
        return [self._terms(i, each, waits[i]) for i, each in enumerate(candidates)]

    def _prediction(self, found: Evaluation) -> Prediction:
        return Prediction(self.base + found.peak, found.seconds, self.moments[found.moment].at)

    def evaluate(self, choice: Sequence[Terms], log: StepLog | None = None) -> Evaluation:
        """Walk the moments of a step by one candidate at each place, and log them if asked to.

        The host launches work block after block, and the device works behind it; it waits for the
        host half of a launch when it is idle, as at the first ops of a block, which are small. The
        link copies one result after another: out in the forward, as results are made, and back in
        the backward, the next one ahead of its use. A step begins with all of them idle.

        Offload lets two large results leave late (`lead_of` in offload/schedule.py), with the
        largest result for a large one; as much stays of the last blocks, whose backward comes
        first.
        """
        return self._backward(choice, self._forward(choice, log), log)

    def evaluate_unless(
        self, choice: Sequence[Terms], is_hopeless: Callable[[int, float], bool]
    ) -> Evaluation | None:
        """Evaluate a choice; None if the bytes and seconds that it takes at least are hopeless.

        They are known after half of the walk: the peak up to the loss, and the time with a backward
        in which nobody waits.
        """
        after = self._forward(choice)
        at_least = after.backward_begins + sum([terms[9] for terms in choice])
        if is_hopeless(after.peak, at_least):
            return None
        return self._backward(choice, after)

    def spans(self, choice: Sequence[Terms]) -> tuple[list[float], list[float]]:
        """Seconds of each block's forward and backward, where nothing moves: with all waiting."""
        log = StepLog()
        after = self._forward(choice, log)
        self._backward_times(choice, after, log)
        begins = [after.backward_begins, *reversed(log.backward_ends)]
        return (
            [end - begin for begin, end in pairwise([0.0, *log.forward_ends])],
            [end - begin for begin, end in pairwise(begins)][::-1],
        )

    def _without_room(self, choice: Sequence[Terms]) -> int:
        """Bytes by which no budget is kept: none, unless more moves than the tier has room for."""
        room = self.profile.tier_bytes
        over = 0 if room is None else sum([terms[5] for terms in choice]) - room
        return _BEYOND_ANY_BUDGET + over if over > 0 else 0

    def _forward(self, choice: Sequence[Terms], log: StepLog | None = None) -> "_Forward":
        """Walk the moments up to the loss; terms go by position, which is quicker than by name."""
        profile, made, starts = self.profile, self._between, self._epoch_starts
        rate, moving = profile.bytes_per_second, _moving(choice)
        stays, moves, lead = moving
        late = lead if any(moves) else 0
        peak, moment = self.moments[0].constant + self._without_room(choice), 0
        held = sent = cached = leaving = 0
        seconds = host = free_at = 0.0
        for i, terms in enumerate(choice):
            cached = 0 if starts[i] == i else cached
            point = made[i] + held + cached + terms[3]
            if sent:
                point += min(leaving + late, sent)
            if point > peak:
                peak, moment = point, 1 + i
            held += terms[0] + stays[i]
            cached += terms[1]
            began = seconds
            begin = host + terms[8] / 2
            if begin < seconds:
                begin = seconds
            host += terms[8]
            seconds = begin + terms[7]
            if seconds < host:
                seconds = host
            if moves[i]:
                sent += moves[i]
                begin = max(free_at, (began + seconds) / 2)
                free_at = max(begin + moves[i] / rate, seconds)
                leaving = int((free_at - seconds) * rate)
            if log is not None:
                before = made[i], held - terms[0] - stays[i], cached - terms[1]
                memory = MemoryAt(*before, point - sum(before) - terms[3], terms[3])
                copy = (begin, begin + moves[i] / rate) if moves[i] else None
                log.add_forward(memory, seconds, copy)
        in_backward = cached if profile.casts_in_backward else 0
        rest = max(cached + profile.cached_rest_peak, in_backward + profile.rest_peak)
        point = made[-1] + held + min(leaving + late, sent) + rest
        if point > peak:
            peak, moment = point, self.count + 1
        if log is not None:
            log.rest = MemoryAt(made[-1], held, 0, min(leaving + late, sent), rest)
        # The second half of the rest is backward, which begins when all has left.
        host += profile.rest_host_seconds
        begins = max(seconds + profile.rest_seconds, free_at + profile.rest_seconds / 2, host)
        return _Forward(moving, peak, moment, held, in_backward, begins, host)

    def _backward(
        self, choice: Sequence[Terms], after: "_Forward", log: StepLog | None = None
    ) -> Evaluation:
        """Walk the moments after the loss."""
        seconds, ahead = self._backward_times(choice, after, log)
        peak, moment = after.peak, after.moment
        there = after.held + after.cached
        between, waiting, stays = self._between, self.waiting, after.moving.stays
        for i in range(self.count - 1, -1, -1):
            terms = choice[i]
            point = there + between[i] + waiting[i] + terms[4] - stays[i] + ahead[i]
            if point > peak:
                peak, moment = point, 2 * self.count + 2 - i
            if log is not None:
                outside, held = between[i] + waiting[i], there - after.cached
                own = terms[4] - stays[i]
                log.backward[i] = MemoryAt(outside, held, after.cached, ahead[i], own)
            there += terms[2] - terms[0] - stays[i]
        if self.moments[-1].constant > peak:
            peak, moment = self.moments[-1].constant, len(self.moments) - 1
        return Evaluation(peak, seconds, moment)

    def _backward_times(
        self, choice: Sequence[Terms], after: "_Forward", log: StepLog | None = None
    ) -> tuple[float, Sequence[int]]:
        """Seconds of the step, and bytes that are back ahead of their use at each place."""
        moves, rate, host = after.moving.moves, self.profile.bytes_per_second, after.host
        seconds = used_at = after.backward_begins
        begins, ends = [0.0] * self.count, [0.0] * self.count
        for i in range(self.count - 1, -1, -1):
            terms = choice[i]
            if moves[i]:  # it has room to come back once the one before it is used
                seconds = used_at = max(seconds, used_at + moves[i] / rate)
            begins[i] = seconds
            begin = host + terms[10] / 2
            if begin < seconds:
                begin = seconds
            host += terms[10]
            seconds = begin + terms[9]
            if seconds < host:
                seconds = host
            ends[i] = seconds
        if log is not None:
            log.backward_begins, log.backward_ends = begins, ends
        if not any(moves):
            return seconds, moves
        starts = _starts_of_returns(moves, begins, after.moving.lead // 2, rate)
        if log is not None:
            log.copies_back = {
                i: (starts[i], starts[i] + moved / rate) for i, moved in enumerate(moves) if moved
            }
        return seconds, _ahead(moves, starts, ends, after.moving.lead // 2, rate)


class _Forward(NamedTuple):
    """The step up to the loss."""

    moving: "_Moving"
    peak: int
    moment: int
    held: int
    cached: int
    """Bytes of casts that stay in autocast's cache for the backward."""
    backward_begins: float
    """When the device begins the backward of the last block, if it need not wait for it."""
    host: float
    """When the host is done with the forward and the rest."""


class _Moving(NamedTuple):
    """Copies of results that move: what is in flight, and who waits, at each place."""

    stays: list[int]
    """Bytes that stay: the backward wants them first."""
    moves: list[int]
    """Bytes that move."""
    lead: int
    """Bytes that may leave late: two large results."""


def simulate(profile: Profile, candidates: Sequence[Candidate]) -> Prediction:
    """The peak and time of a step in which each block runs by its candidate."""
    return Timeline(profile).predict_candidates(candidates)


def cached_after_blocks(profile: Profile, candidates: Sequence[Candidate]) -> int:
    """Bytes of casts that autocast's cache alone holds after the last block's forward."""
    timeline = Timeline(profile)
    (moment, *_) = (m for m in timeline.moments if m.left_until == timeline.count and not m.peak)
    first: Counter[str] = Counter()
    found = 0
    for i in moment.cached:
        path = profile.order[i][0]
        found += candidates[i].casts_cached if profile.cast_epochs and not first[path] else 0
        first[path] += 1
    return found


def _moving(choice: Sequence[Terms]) -> _Moving:
    stays = [0] * len(choice)
    lead = rest = 2 * max([terms[6] for terms in choice])
    moves = [terms[5] for terms in choice]
    for i in range(len(choice) - 1, -1, -1):
        if not rest:
            break
        if moves[i]:
            stays[i] = min(moves[i], rest)
            rest -= stays[i]
            moves[i] -= stays[i]
    return _Moving(stays, moves, lead)


def _starts_of_returns(
    moves: Sequence[int], begins: Sequence[float], largest: int, rate: float
) -> list[float]:
    """The seconds at which the copies back to each block begin; infinite before the first one.

    Results come back one after another, as late as the link allows, with the time of one result to
    spare.
    """
    starts, start = [], float("inf")
    for moved, begin in zip(moves, begins, strict=True):
        if moved:
            start = min(start, begin - largest / rate) - moved / rate
        starts.append(start)
    return starts


def _ahead(
    moves: Sequence[int],
    starts: Sequence[float],
    ends: Sequence[float],
    largest: int,
    rate: float,
) -> list[int]:
    """Bytes that are back ahead of their use at the end of each block's backward.

    Each result takes its memory as a whole.
    """
    found = []
    for i, end in enumerate(ends):
        ahead = 0
        for j in range(i - 1, -1, -1):
            if starts[j] >= end:
                break
            ahead += min(int((end - starts[j]) * rate) + largest, moves[j])
        found.append(ahead)
    return found
