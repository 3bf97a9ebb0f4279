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


def choose(
    entries: Sequence[Entry],
    order: Sequence[int],
    quota: float | None,
    link: Link | None,
) -> Choice:
    """Which of the activations go, given the order in which backward uses them.

    `quota` is a number of bytes, a share, or None: as much as is free. Without times or `link`
    that is not known yet, and everything goes that may.

    >>> entries = [Entry(8, saved_at=float(i), used_at=16.0 - 2 * i) for i in range(6)]
    >>> choice = choose(entries, [5, 4, 3, 2, 1, 0], None, Link(out=4.0, back=4.0))
    >>> sorted(choice.moved), choice.ceiling  # after six seconds of forward, two have left
    ([0, 1], 32)
    """
    first = _wanted_first(entries, order)
    able = [i for i, entry in enumerate(entries) if not entry.stays and i not in first]
    if quota is None:
        moved = able if link is None else _free(entries, able, order, link)
    else:
        movable = sum(entry.nbytes for entry in entries if not entry.stays)
        limit = quota * movable if isinstance(quota, float) else quota
        reached = accumulate(entries[i].nbytes for i in able)
        moved = [i for i, nbytes in zip(able, reached, strict=True) if nbytes <= limit]
    chosen = frozenset(moved)
    sizes = [entry.nbytes for entry in entries]
    ceiling = max(sum(sizes) - sum(sizes[i] for i in chosen), lead_of(sizes))
    used = [entry.used_at for entry in entries]
    if link is None or link.back == 0 or any(used[i] is None for i in order):
        fetch_at = fetch_ahead(sizes, order, chosen)
    else:
        fetch_at = _fetch_in_time(entries, order, chosen, link)
    return Choice(chosen, ceiling, fetch_at)


def lead_of(sizes: Sequence[int]) -> int:
    """Bytes to have on the way at a time: two of the largest, so that neither end ever waits."""
    return 2 * max(sizes, default=0)


def _wanted_first(entries: Sequence[Entry], order: Sequence[int]) -> set[int]:
    """The activations that backward begins with: it would wait for them to come back."""
    lead = lead_of([entry.nbytes for entry in entries])
    reached = accumulate(entries[i].nbytes for i in order)
    return {i for i, nbytes in zip(order, reached, strict=True) if nbytes <= lead}


def _free(
    entries: Sequence[Entry], able: Sequence[int], order: Sequence[int], link: Link
) -> list[int]:
    """The activations whose copies are done in time in both directions."""
    uses = [entry.used_at for entry in entries if entry.used_at is not None]
    if not uses or not link.out:
        return list(able)
    turn = min(uses)  # the forward is over
    out, back = _MARGIN * link.out, _MARGIN * (link.back or link.out)
    gone, done = set(), 0.0
    for i in able:
        saved_at, nbytes = entries[i].saved_at or 0.0, entries[i].nbytes
        if max(done, saved_at) + nbytes / out <= turn:
            done = max(done, saved_at) + nbytes / out
            gone.add(i)
    done = turn
    for i in order:
        used_at = entries[i].used_at
        if i in gone and used_at is not None:
            if done + entries[i].nbytes / back <= used_at:
                done += entries[i].nbytes / back
            else:
                gone.remove(i)
    return sorted(gone)


def fetch_ahead(
    sizes: Sequence[int], order: Sequence[int], moved: frozenset[int]
) -> dict[int, tuple[int, ...]]:
    """Ask for each activation while the ones before it are used: a fixed number of bytes ahead."""
    lead = lead_of(sizes)
    fetch_at: dict[int, list[int]] = {}
    on_the_way = begin = 0
    coming = [(use, i) for use, i in enumerate(order) if i in moved]
    for position, (_, i) in enumerate(coming):
        on_the_way += sizes[i]
        while on_the_way > lead and begin < position:
            on_the_way -= sizes[coming[begin][1]]
            begin += 1
        use = coming[begin - 1][0] + 1 if begin else 0
        fetch_at.setdefault(use, []).append(i)
    return {use: tuple(found) for use, found in fetch_at.items()}


def _fetch_in_time(
    entries: Sequence[Entry], order: Sequence[int], moved: frozenset[int], link: Link
) -> dict[int, tuple[int, ...]]:
    """Ask for each activation as late as the link allows, so that it takes memory no longer."""
    back = _MARGIN * link.back
    spare = lead_of([entry.nbytes for entry in entries]) / 2 / back
    used = [entries[i].used_at or 0.0 for i in order]
    fetch_at: dict[int, list[int]] = {}
    begin, use = float("inf"), len(order) - 1
    for position in range(len(order) - 1, -1, -1):
        i = order[position]
        if i not in moved:
            continue
        begin = min(begin, used[position] - spare) - entries[i].nbytes / back
        while use > 0 and (use >= position or used[use] > begin):
            use -= 1
        fetch_at.setdefault(use, []).append(i)
    return {use: tuple(reversed(found)) for use, found in fetch_at.items()}
