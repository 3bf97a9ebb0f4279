"""Which activations go, and when they are asked back: a pure function of what was measured.

Offload costs no time as long as the link is done in time. It has from the moment an activation is
saved to the end of the forward to copy it out (what is still here then adds to the peak), and from
then to its use to copy it in. Both directions work at once and each copies one thing after another,
so a walk along the step tells exactly what fits. Activations saved first are used last and have
the longest lives: they go first. Those that backward wants first do not go at all.

Not optimal where activations differ in size: the walk takes what fits next, never less to get more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

_MARGIN = 0.95
"""The share of the measured bandwidth that is counted on."""


@dataclass(frozen=True)
class Entry:
    """One activation of a step. Times are seconds of the device's work, without its waits."""

    nbytes: int
    stays: bool = False
    """Whether somebody else holds it all the time, so that moving it frees nothing."""
    saved_at: float | None = None
    used_at: float | None = None


@dataclass(frozen=True)
class Link:
    """Bytes per second in each direction, both at a time."""

    out: float
    back: float


@dataclass(frozen=True)
class Choice:
    """What happens to the activations of a step, by their number in the order of saving."""

    moved: frozenset[int]
    ceiling: int
    """The most bytes of activations that are to be on the device at a time."""
    fetch_at: Mapping[int, tuple[int, ...]]
    """Which ones are asked back at the n-th use of a step's activations."""
    ceilings: tuple[int, ...] = ()
    """The same for the forward, as it is after each activation is saved; none: always `ceiling`."""


def choose(
    entries: Sequence[Entry],
    order: Sequence[int],
    quota: float | None,
    link: Link | None,
    hurries: bool = True,
) -> Choice:
    """Which of the activations go, given the order in which backward uses them.

    `quota` is a number of bytes, a share, or None: as much as is free. Without times or `link`
    that is not known yet, and everything goes that may. What a quota sends `hurries`, so that
    little of it is on the way at a time, or else has the time it takes.

    >>> entries = [Entry(8, saved_at=float(i), used_at=16.0 - 2 * i) for i in range(6)]
    >>> choice = choose(entries, [5, 4, 3, 2, 1, 0], None, Link(out=4.0, back=4.0))
    >>> sorted(choice.moved), choice.ceiling  # there is time for two in the forward
    ([0, 1], 32)
    """
    sizes = [entry.nbytes for entry in entries]
    first = _wanted_first(sizes, order)
    able = [i for i, entry in enumerate(entries) if not entry.stays and i not in first]
    if quota is not None:
        movable = sum(entry.nbytes for entry in entries if not entry.stays)
        limit = round(quota * movable) if isinstance(quota, float) else quota
        reached = accumulate(sizes[i] for i in able)
        able = [i for i, nbytes in zip(able, reached, strict=True) if nbytes <= limit]
    moved = frozenset(able)
    ceiling = _ceiling(sizes, moved, 0)
    turn = _turn(entries)
    if link is None or not link.out or turn is None:
        return Choice(moved, ceiling, fetch_ahead(sizes, order, moved))
    rate, link = link.out, Link(_MARGIN * link.out, _MARGIN * (link.back or link.out))
    if quota is None:
        moved, ceiling = _free(entries, able, order, turn, link)
    ceilings: tuple[int, ...] = ()
    if quota is not None and not hurries:
        gone = _out_in_time(entries, able, float("inf"), rate)
        slack = lead_of(sizes)  # so that a copy that is a little late is not waited for
        ceilings = tuple(height + slack for height in _heights(entries, gone))
        ceiling = _ceiling(sizes, moved, max(ceilings, default=0))
    return Choice(moved, ceiling, _fetch_in_time(entries, order, moved, link), ceilings)


def lead_of(sizes: Sequence[int]) -> int:
    """Bytes to have on the way at a time: two large ones, so that neither end ever waits.

    A few that are far larger than the others, such as logits, do not count.
    """
    return 2 * sorted(sizes)[int(0.9 * (len(sizes) - 1))] if sizes else 0


def _ceiling(sizes: Sequence[int], moved: frozenset[int], peak: int) -> int:
    """As much as stays, or as there may be on the way at a time, or as the peak if it is known."""
    stays = sum(sizes) - sum(sizes[i] for i in moved)
    largest = max((sizes[i] for i in moved), default=0)
    return max(stays, lead_of(sizes), largest, peak)


def _turn(entries: Sequence[Entry]) -> float | None:
    """When backward begins."""
    return min((entry.used_at for entry in entries if entry.used_at is not None), default=None)


def _wanted_first(sizes: Sequence[int], order: Sequence[int]) -> set[int]:
    """The activations that backward begins with: it would wait for them to come back."""
    lead = lead_of(sizes)
    before = accumulate((sizes[i] for i in order), initial=0)
    return {i for i, nbytes in zip(order, before, strict=False) if nbytes < lead}


def _free(
    entries: Sequence[Entry], able: Sequence[int], order: Sequence[int], turn: float, link: Link
) -> tuple[frozenset[int], int]:
    """The activations whose copies are done in time in both directions, and the peak of that."""
    sizes = [entry.nbytes for entry in entries]
    while True:
        gone = _out_in_time(entries, able, turn, link.out)
        moved = frozenset(gone)
        ceiling = _ceiling(sizes, moved, _peak(entries, gone))
        late = _back_too_late(entries, order, moved, ceiling, turn, link.back)
        if not late:
            return moved, ceiling
        able = [i for i in able if i not in late]


def _out_in_time(
    entries: Sequence[Entry], able: Sequence[int], turn: float, rate: float
) -> dict[int, float]:
    """Those that have left when backward begins, and when each of them has."""
    gone: dict[int, float] = {}
    done = 0.0
    for i in able:
        left = max(done, entries[i].saved_at or 0.0) + entries[i].nbytes / rate
        if left <= turn:
            gone[i] = done = left
    return gone


def _peak(entries: Sequence[Entry], gone: Mapping[int, float]) -> int:
    """The most bytes that are on the device at a time in the forward."""
    changes = [(entry.saved_at or 0.0, entry.nbytes) for entry in entries]
    changes += [(left, -entries[i].nbytes) for i, left in gone.items()]
    changes.sort(key=lambda change: (change[0], -change[1]))
    return max(accumulate(nbytes for _, nbytes in changes), default=0)


def _heights(entries: Sequence[Entry], gone: Mapping[int, float]) -> tuple[int, ...]:
    """Bytes on the device when each activation has just been saved, if copies take their time."""
    heights = []
    for i, entry in enumerate(entries):
        now = entry.saved_at or 0.0
        heights.append(
            sum(e.nbytes for j, e in enumerate(entries[: i + 1]) if gone.get(j, now + 1) > now)
        )
    return tuple(heights)


def _back_too_late(
    entries: Sequence[Entry],
    order: Sequence[int],
    moved: frozenset[int],
    ceiling: int,
    turn: float,
    rate: float,
) -> set[int]:
    """Those that are not back when backward wants them, if no more may be there than `ceiling`."""
    here = sum(entry.nbytes for i, entry in enumerate(entries) if i not in moved)
    late, done, has_room_since, used_up = set(), turn, turn, 0
    for position, i in enumerate(order):
        used_at, nbytes = entries[i].used_at or turn, entries[i].nbytes
        if i not in moved:
            continue
        while here + nbytes > ceiling and used_up < position:
            here -= entries[order[used_up]].nbytes
            used_up += 1
            has_room_since = entries[order[used_up]].used_at or turn
        back = max(done, has_room_since) + nbytes / rate
        if back > used_at:
            late.add(i)
        else:
            here, done = here + nbytes, back
    return late


def fetch_ahead(
    sizes: Sequence[int], order: Sequence[int], moved: frozenset[int]
) -> dict[int, tuple[int, ...]]:
    """Ask for each activation a fixed number of bytes before its use."""
    lead = lead_of(sizes)
    fetch_at: dict[int, list[int]] = {}
    between, use = 0, 0
    for position, i in enumerate(order):
        between += sizes[i]
        while between > lead and use < position - 1:
            between -= sizes[order[use]]
            use += 1
        if i in moved:
            fetch_at.setdefault(use, []).append(i)
    return {use: tuple(found) for use, found in fetch_at.items()}


def _fetch_in_time(
    entries: Sequence[Entry], order: Sequence[int], moved: frozenset[int], link: Link
) -> dict[int, tuple[int, ...]]:
    """Ask for each activation as late as the link allows, so that it takes memory no longer."""
    spare = lead_of([entry.nbytes for entry in entries]) / 2 / link.back
    used = [entries[i].used_at or 0.0 for i in order]
    fetch_at: dict[int, list[int]] = {}
    begin, use = float("inf"), len(order) - 1
    for position in range(len(order) - 1, -1, -1):
        i = order[position]
        if i not in moved:
            continue
        begin = min(begin, used[position] - spare) - entries[i].nbytes / link.back
        while use > 0 and (use >= position or used[use] > begin):
            use -= 1
        fetch_at.setdefault(use, []).append(i)
    return {use: tuple(reversed(found)) for use, found in fetch_at.items()}
