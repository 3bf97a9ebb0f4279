"""First-fit allocation in one long stretch of bytes; freed parts are joined with neighbours.

The same steps ask for the same sizes in the same order, and first fit then gives the same places:
a stretch that was long enough for one step is long enough for all of them.

Note [Room belongs to an object]. Whoever takes room gets a lease, and the room is in use for as
long as that object lives; so it comes back also if Ctrl-C strikes before the caller has stored the
lease. The death of a lease is recorded without running any Python: a weak reference appends itself
to a list. And the arena goes from one state to the next by plain assignments, between which nothing
can strike.
"""

from bisect import bisect_left
from collections import deque
from typing import TypeAlias
from weakref import ref

ALIGNMENT = 4096

_Stretches: TypeAlias = tuple[tuple[int, int], ...]
"""The start and the length of each stretch, in order."""


class Lease:
    """Some bytes of an arena, taken as long as this lives. Note [Room belongs to an object]."""

    __slots__ = ("__weakref__", "nbytes", "start")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.nbytes = nbytes


class _Lent(ref[Lease]):
    """A weak reference to a lease, with its place for when the lease is gone."""

    __slots__ = ("length", "start")
    length: int
    start: int


class Arena:
    """Leases of places within `size` bytes, of whatever memory or file that is."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: _Stretches = ((0, size),) if size else ()
        """Free stretches, no two of which touch."""
        self._lent: dict[int, _Lent] = {}
        self._returned: deque[_Lent] = deque()
        """Leases that died since they were last looked at; from any thread."""

    @property
    def is_unused(self) -> bool:
        self._take_back()
        return not self.size or self._free == ((0, self.size),)

    def lease(self, nbytes: int) -> Lease | None:
        """Lease the lowest free stretch of at least `nbytes`; None if there is none."""
        self._take_back()
        length = aligned(nbytes)
        for position, (start, free) in enumerate(self._free):
            if free < length:
                continue
            rest = ((start + length, free - length),) if free > length else ()
            stretches = (*self._free[:position], *rest, *self._free[position + 1 :])
            lease = Lease(start, nbytes)
            lent = _Lent(lease, self._returned.append)
            lent.start, lent.length = start, length
            key = id(lent)
            self._lent[key] = lent
            self._free = stretches
            return lease
        return None

    def grow(self, nbytes: int) -> None:
        """Add at least `nbytes` at the end."""
        length = aligned(nbytes)
        stretches = _with(self._free, self.size, length)
        self.size += length
        self._free = stretches

    def missing(self, nbytes: int) -> int:
        """Returns the bytes to grow by, so that `nbytes` fit."""
        start, length = self._free[-1] if self._free else (self.size, 0)
        return aligned(nbytes) - (length if start + length == self.size else 0)

    def _take_back(self) -> None:
        while self._returned:
            lent = self._returned[0]
            key = id(lent)
            if self._lent.get(key) is lent:  # else it was interrupted before anything was taken
                stretches = _with(self._free, lent.start, lent.length)
                self._free = stretches
                del self._lent[key]
            self._returned.popleft()


def _with(free: _Stretches, start: int, length: int) -> _Stretches:
    """Returns the free stretches and one more, joined with those it touches."""
    if not length:
        return free
    position = after = bisect_left(free, (start, 0))
    if after < len(free) and free[after][0] == start + length:
        length += free[after][1]
        after += 1
    if position and sum(free[position - 1]) == start:
        position -= 1
        start, length = free[position][0], free[position][1] + length
    return (*free[:position], (start, length), *free[after:])


def aligned(nbytes: int) -> int:
    """Returns `nbytes` rounded up to whole pages."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
