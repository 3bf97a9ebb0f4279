"""The step's timeline: how high memory rises at each of its points, and how long it takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.planner.types import Candidate, Prediction, Profile


def simulate(profile: Profile, candidates: Sequence[Candidate]) -> Prediction:
    """What happens if each block runs by its candidate, in the order of the forward.

    The offload engine lets two large results leave late: its lead, as `offload.choose.lead_of` has
    it, with the largest result for a large one. What comes back does so in time.
    """
    lead = 2 * max((candidate.largest_moved for candidate in candidates), default=0)
    stays = _stays(candidates, lead)
    moves = [
        candidate.bytes_moved - stay for candidate, stay in zip(candidates, stays, strict=True)
    ]
    late = lead if any(moves) else 0
    between = profile.between or (0,) * len(candidates)
    gone = _gone(profile, candidates)
    course = _Course(profile.bytes_per_second)
    points = [profile.first_peak - profile.before_bytes]
    held = sent = 0
    cached, again, pending = _casts(profile, candidates)
    for i, candidate in enumerate(candidates):
        held += between[i]
        on_the_way = min(course.leaving + late, sent)
        points.append(held + cached[i] + on_the_way + candidate.forward_peak)
        held += candidate.bytes_held + stays[i] - gone[i] - again[i]
        sent += moves[i]
        course.forward(candidate, moves[i])
    until_emptied = cached[-1] + profile.cached_rest_peak
    in_backward = cached[-1] if profile.casts_in_backward else 0
    rest = max(until_emptied, in_backward + profile.rest_peak)
    points.append(held + min(course.leaving + late, sent) + rest)
    course.turn(profile.rest_seconds)
    spans = [course.backward(candidates[i], moves[i]) for i in range(len(candidates) - 1, -1, -1)]
    ahead = _ahead(moves, spans[::-1], lead // 2, profile.bytes_per_second) if sent else moves
    for i in range(len(candidates) - 1, -1, -1):
        candidate, stay = candidates[i], stays[i]
        there = held + in_backward + profile.output_held
        points.append(there + candidate.backward_peak - stay + ahead[i])
        held -= candidate.bytes_held + stay + between[i] - gone[i] - again[i]
        held += pending[i]
    points.append(profile.last_peak - profile.before_bytes)
    highest = max(points)
    base = profile.static_bytes + profile.before_bytes
    return Prediction(base + highest, course.seconds, _told(profile, points.index(highest)))


def cached_after_blocks(profile: Profile, candidates: Sequence[Candidate]) -> int:
    """Bytes of casts that autocast's cache alone holds after the last block's forward."""
    return _casts(profile, candidates)[0][-1]


def _casts(
    profile: Profile, candidates: Sequence[Candidate]
) -> tuple[list[int], list[int], list[int]]:
    """Bytes of weight casts, by place: Note [How long casts live] in cast_cache.py.

    First, those that autocast's cache alone holds before each block and, at the end, after all.
    Second, those that a block holds and that an earlier call of it counts already: its weights are
    cast once, as long as the cache is not emptied. Third, how the gradients of casts change that
    wait for more: one cast has one gradient, so that of a block's last call waits for its first.
    """
    count = len(candidates)
    cached, again, pending = [0] * (count + 1), [0] * count, [0] * count
    epochs = profile.cast_epochs
    if not epochs:
        return cached, again, pending
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, candidate in enumerate(candidates):
        path = profile.order[i][0]
        casts = candidate.casts_cached + candidate.casts_held
        if i and epochs[i] != epochs[i - 1]:
            first.clear()
            cached[i] = 0
        if path in first:
            again[i] = candidate.casts_held
            cached[i + 1] = cached[i]
            pending[last[path]] -= casts if last[path] != first[path] else 0
            pending[first[path]] = -casts
            pending[i] = casts
        else:
            first[path] = i
            cached[i + 1] = cached[i] + candidate.casts_cached
        last[path] = i
    return cached, again, pending


def _gone(profile: Profile, candidates: Sequence[Candidate]) -> Sequence[int]:
    """Of what each block is given, bytes that are gone after its forward.

    They are the output of the block before, which counts as held until then; and again in that
    one's backward, whose peak is told from there.
    """
    if not profile.passed:
        return (0,) * len(candidates)
    return [
        candidate.input_freed if candidate.input_freed < passed else passed
        for passed, candidate in zip(profile.passed, candidates, strict=True)
    ]


def _told(profile: Profile, point: int) -> str:
    """Where in the step a point of the timeline is."""
    count = len(profile.order)
    if point == 0:
        return "the forward before the blocks"
    if point == count + 1:
        return "the head and the loss"
    if point == 2 * count + 2:
        return "the backward after the blocks"
    way, i = ("forward", point - 1) if point <= count else ("backward", 2 * count + 1 - point)
    return f"the {way} of {profile.order[i][0] or 'the model'}"


def _stays(candidates: Sequence[Candidate], lead: int) -> list[int]:
    """Bytes of each block that are to move and do not, from the last block on, `lead` in all.

    The backward wants them first, so the offload engine keeps as much as two large results.
    """
    stays = [0] * len(candidates)
    for i in range(len(candidates) - 1, -1, -1):
        if not lead:
            break
        stays[i] = min(candidates[i].bytes_moved, lead)
        lead -= stays[i]
    return stays


def _ahead(
    moves: Sequence[int], spans: Sequence[tuple[float, float]], largest: int, rate: float
) -> list[int]:
    """What is there ahead of its use in each backward, by its end.

    Things come back one after another, as late as the link allows, with the time of one result to
    spare; each takes its memory as a whole.
    """
    begins, begin = [], float("inf")
    for moved, (start, _) in zip(moves, spans, strict=True):
        if moved:
            begin = min(begin, start - largest / rate) - moved / rate
        begins.append(begin)
    found = []
    for i, (_, end) in enumerate(spans):
        ahead = 0
        for j in range(i - 1, -1, -1):
            if begins[j] >= end:
                break
            ahead += min(int((end - begins[j]) * rate) + largest, moves[j])
        found.append(ahead)
    return found


@dataclass
class _Course:
    """The host has the device work, block after block, and the link copies one thing after another.

    Out in the forward, back in the backward. A step begins with all of them idle.
    """

    rate: float
    seconds: float = 0.0
    """What the device has worked and waited so far."""
    host: float = 0.0
    """The same of the host, which waits for nobody."""
    free_at: float = 0.0
    """When all is copied that was given so far."""
    room_at: float = 0.0
    """When the one that comes back next could begin: when the one before it was used."""
    leaving: int = 0
    """Bytes on their way out when something was last sent: until then it is let go, not after."""

    def forward(self, candidate: Candidate, moved: int) -> None:
        """A block's forward, with what it sends away: as it is made."""
        began = self.seconds
        self._work(candidate.forward_seconds, candidate.forward_host_seconds)
        if moved:
            begin = max(self.free_at, (began + self.seconds) / 2)
            self.free_at = max(begin + moved / self.rate, self.seconds)
            self.leaving = int((self.free_at - self.seconds) * self.rate)

    def turn(self, seconds: float) -> None:
        """The rest of the step: its second half is backward, which begins when all has left."""
        self.seconds = max(self.seconds + seconds, self.free_at + seconds / 2)
        self.free_at = self.room_at = self.seconds

    def backward(self, candidate: Candidate, moved: int) -> tuple[float, float]:
        """A block's backward, for which something has to come back: the next one ahead of it.

        Returns when it begins and ends.
        """
        if moved:
            came = max(self.free_at, self.room_at) + moved / self.rate
            self.free_at, self.room_at = came, max(self.seconds, came)
            self.seconds = max(self.seconds, came)
        start = self.seconds
        self._work(candidate.backward_seconds, candidate.backward_host_seconds)
        return start, self.seconds

    def _work(self, seconds: float, host: float) -> None:
        """The device works behind the host.

        An idle one waits for the host at each of its first ops, which are small: reckoned as if it
        began when the host is half done.
        """
        begin = self.host + host / 2
        if begin < self.seconds:
            begin = self.seconds
        self.host += host
        self.seconds = begin + seconds
        if self.seconds < self.host:
            self.seconds = self.host
