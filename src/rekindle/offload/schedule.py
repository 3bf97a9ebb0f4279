"""Schedules of steps: what leaves and when it is prefetched, a pure function of measurements.

Offload costs no time as long as the link is done in time. It has from the moment an activation is
saved to the end of the forward to copy it out (what is still on the device then adds to the peak),
and from then to its use to copy it back. Both directions work at once and each copies one
activation after another, so a walk along the step tells exactly what fits. Activations saved first
are used last and have the longest lives: they leave first. Those that backward uses first do not
leave at all.

Not optimal where activations differ in size: the walk takes what fits next, never less to get more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

_MARGIN = 0.95
"""The share of the measured bandwidth that is counted on."""


@dataclass(frozen=True)
class ActivationTimes:
    """One activation of a step. Times are seconds of the device's work, without its waits."""

    nbytes: int
    stays: bool = False
    """True if somebody else holds it all the time, so that moving it frees nothing."""
    saved_at: float | None = None
    used_at: float | None = None


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second in each direction, while both are in use."""

    out: float
    back: float


@dataclass(frozen=True)
class Schedule:
    """Copy-outs and prefetches of a step. Indices count its activations in the order of saving."""

    moved: frozenset[int]
    """Indices of activations that are copied out."""
    ceiling: int
    """The most bytes of activations that may be on the device at a time."""
    prefetch_at: Mapping[int, tuple[int, ...]]
    """By position in backward: indices whose copy back begins at that use."""
    forward_ceilings: tuple[int, ...] = ()
    """By index: the ceiling in forward, right after that save; if empty, it is `ceiling`."""

    def ceiling_after(self, index: int) -> int:
        """Returns the ceiling in forward, right after an activation was saved."""
        ceilings = self.forward_ceilings
        return ceilings[index] if index < len(ceilings) else self.ceiling


def make_schedule(
    entries: Sequence[ActivationTimes],
    order: Sequence[int],
    quota: float | None,
    rates: LinkRates | None,
    limit_in_flight: bool = True,
) -> Schedule:
    """Returns the schedule of a step, given the order in which backward uses its activations.

    `quota` is a number of bytes, a share, or None: as much as costs no time. Without times or
    `rates` that is not known yet, and everything leaves that may. With a quota, `limit_in_flight`
    has the device wait for copies so that few bytes are in flight; else copies take their time.

    >>> entries = [ActivationTimes(8, saved_at=float(i), used_at=16.0 - 2 * i) for i in range(6)]
    >>> schedule = make_schedule(entries, [5, 4, 3, 2, 1, 0], None, LinkRates(out=4.0, back=4.0))
    >>> sorted(schedule.moved), schedule.ceiling  # there is time for two in the forward
    ([0, 1], 32)
    """
    sizes = [entry.nbytes for entry in entries]
    first = _used_first(sizes, order)
    able = [i for i, entry in enumerate(entries) if not entry.stays and i not in first]
    if quota is not None:
        movable = sum(entry.nbytes for entry in entries if not entry.stays)
        limit = round(quota * movable) if isinstance(quota, float) else quota
        reached = accumulate(sizes[i] for i in able)
        able = [i for i, nbytes in zip(able, reached, strict=True) if nbytes <= limit]
    moved = frozenset(able)
    ceiling = _ceiling(sizes, moved, 0)
    backward_at = _backward_begin(entries)
    if rates is None or not rates.out or backward_at is None:
        return Schedule(moved, ceiling, prefetch_ahead(sizes, order, moved))
    rate = rates.out
    rates = LinkRates(_MARGIN * rates.out, _MARGIN * (rates.back or rates.out))
    if quota is None:
        moved, ceiling = _free(entries, able, order, backward_at, rates)
    ceilings: tuple[int, ...] = ()
    if quota is not None and not limit_in_flight:
        left_at = _left_in_time(entries, able, float("inf"), rate)
        slack = bytes_in_flight(sizes)  # so that a copy that is a little late is not waited for
        ceilings = tuple(height + slack for height in _forward_heights(entries, left_at))
        ceiling = _ceiling(sizes, moved, max(ceilings, default=0))
    prefetch_at = _prefetch_in_time(entries, order, moved, rates)
    return Schedule(moved, ceiling, prefetch_at, ceilings)


def bytes_in_flight(sizes: Sequence[int]) -> int:
    """Returns the bytes to have in flight at a time: two large ones, so that neither end waits.

    A few that are far larger than the others, such as logits, do not count.
    """
    return 2 * sorted(sizes)[int(0.9 * (len(sizes) - 1))] if sizes else 0


def _ceiling(sizes: Sequence[int], moved: frozenset[int], peak: int) -> int:
    """Returns the bytes that stay, or that may be in flight, or the known peak: the largest."""
    stays = sum(sizes) - sum(sizes[i] for i in moved)
    largest = max((sizes[i] for i in moved), default=0)
    return max(stays, bytes_in_flight(sizes), largest, peak)


def _backward_begin(entries: Sequence[ActivationTimes]) -> float | None:
    """Returns the time at which backward begins."""
    return min((entry.used_at for entry in entries if entry.used_at is not None), default=None)


def _used_first(sizes: Sequence[int], order: Sequence[int]) -> set[int]:
    """Returns the activations that backward begins with: it would wait for their return."""
    lead = bytes_in_flight(sizes)
    before = accumulate((sizes[i] for i in order), initial=0)
    return {i for i, nbytes in zip(order, before, strict=False) if nbytes < lead}


def _free(
    entries: Sequence[ActivationTimes],
    able: Sequence[int],
    order: Sequence[int],
    backward_at: float,
    rates: LinkRates,
) -> tuple[frozenset[int], int]:
    """Returns the activations whose copies are in time in both directions, and their peak."""
    sizes = [entry.nbytes for entry in entries]
    while True:
        left_at = _left_in_time(entries, able, backward_at, rates.out)
        moved = frozenset(left_at)
        ceiling = _ceiling(sizes, moved, _forward_peak(entries, left_at))
        late = _back_too_late(entries, order, moved, ceiling, backward_at, rates.back)
        if not late:
            return moved, ceiling
        able = [i for i in able if i not in late]


def _left_in_time(
    entries: Sequence[ActivationTimes], able: Sequence[int], deadline: float, rate: float
) -> dict[int, float]:
    """Returns those whose copy-outs end by `deadline`, each with the time when it ends."""
    left_at: dict[int, float] = {}
    done = 0.0
    for i in able:
        left = max(done, entries[i].saved_at or 0.0) + entries[i].nbytes / rate
        if left <= deadline:
            left_at[i] = done = left
    return left_at


def _forward_peak(entries: Sequence[ActivationTimes], left_at: Mapping[int, float]) -> int:
    """Returns the most bytes that are on the device at a time in forward."""
    changes = [(entry.saved_at or 0.0, entry.nbytes) for entry in entries]
    changes += [(left, -entries[i].nbytes) for i, left in left_at.items()]
    changes.sort(key=lambda change: (change[0], -change[1]))
    return max(accumulate(nbytes for _, nbytes in changes), default=0)


def _forward_heights(
    entries: Sequence[ActivationTimes], left_at: Mapping[int, float]
) -> tuple[int, ...]:
    """Returns the bytes on the device after each save, if no copy-out is waited for."""
    heights = []
    for i, entry in enumerate(entries):
        now = entry.saved_at or 0.0
        heights.append(
            sum(e.nbytes for j, e in enumerate(entries[: i + 1]) if left_at.get(j, now + 1) > now)
        )
    return tuple(heights)


def _back_too_late(
    entries: Sequence[ActivationTimes],
    order: Sequence[int],
    moved: frozenset[int],
    ceiling: int,
    backward_at: float,
    rate: float,
) -> set[int]:
    """Returns those that return after their use, if no more than `ceiling` may be on the device."""
    on_device = sum(entry.nbytes for i, entry in enumerate(entries) if i not in moved)
    late, done, has_room_since, used_up = set(), backward_at, backward_at, 0
    for position, i in enumerate(order):
        used_at, nbytes = entries[i].used_at or backward_at, entries[i].nbytes
        if i not in moved:
            continue
        while on_device + nbytes > ceiling and used_up < position:
            on_device -= entries[order[used_up]].nbytes
            used_up += 1
            has_room_since = entries[order[used_up]].used_at or backward_at
        back = max(done, has_room_since) + nbytes / rate
        if back > used_at:
            late.add(i)
        else:
            on_device, done = on_device + nbytes, back
    return late


def prefetch_ahead(
    sizes: Sequence[int], order: Sequence[int], moved: frozenset[int]
) -> dict[int, tuple[int, ...]]:
    """Prefetch each activation a fixed number of bytes before its use; by position in backward."""
    lead = bytes_in_flight(sizes)
    prefetch_at: dict[int, list[int]] = {}
    between, use = 0, 0
    for position, i in enumerate(order):
        between += sizes[i]
        while between > lead and use < position - 1:
            between -= sizes[order[use]]
            use += 1
        if i in moved:
            prefetch_at.setdefault(use, []).append(i)
    return {use: tuple(found) for use, found in prefetch_at.items()}


def _prefetch_in_time(
    entries: Sequence[ActivationTimes],
    order: Sequence[int],
    moved: frozenset[int],
    rates: LinkRates,
) -> dict[int, tuple[int, ...]]:
    """Prefetch each activation as late as the link allows; by position in backward."""
    spare = bytes_in_flight([entry.nbytes for entry in entries]) / 2 / rates.back
    used = [entries[i].used_at or 0.0 for i in order]
    prefetch_at: dict[int, list[int]] = {}
    begin, use = float("inf"), len(order) - 1
    for position in range(len(order) - 1, -1, -1):
        i = order[position]
        if i not in moved:
            continue
        begin = min(begin, used[position] - spare) - entries[i].nbytes / rates.back
        while use > 0 and (use >= position or used[use] > begin):
            use -= 1
        prefetch_at.setdefault(use, []).append(i)
    return {use: tuple(reversed(found)) for use, found in prefetch_at.items()}
