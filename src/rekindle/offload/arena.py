"""Room in one long stretch of bytes: handed out first fit, taken back, joined with its neighbours.

The same steps ask for the same sizes in the same order, and first fit then gives the same places:
a stretch that was long enough for one step is long enough for all of them.
"""

from bisect import bisect_left

ALIGNMENT = 4096


class Arena:
    """Offsets within `size` bytes; knows nothing of what they are offsets into."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._starts = [0] if size else []
        """Where the free stretches begin, in order; no two of them touch."""
        self._lengths = {0: size} if size else {}

    @property
    def is_unused(self) -> bool:
        return not self.size or self._lengths.get(0) == self.size

    def take(self, nbytes: int) -> int | None:
        """The offset of a free stretch of at least `nbytes`, now taken; None if there is none."""
        length = aligned(nbytes)
        for position, start in enumerate(self._starts):
            free = self._lengths[start]
            if free < length:
                continue
            del self._lengths[start]
            if free == length:
                del self._starts[position]
            else:
                self._starts[position] = start + length
                self._lengths[start + length] = free - length
            return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """Free what `take` gave for `nbytes`."""
        self._free(start, aligned(nbytes))

    def grow(self, nbytes: int) -> None:
        """Add at least `nbytes` at the end."""
        length = aligned(nbytes)
        self.size += length
        self._free(self.size - length, length)

    def missing(self, nbytes: int) -> int:
        """How much to grow by, so that `nbytes` fit."""
        last = self._starts[-1] if self._starts else self.size
        at_the_end = self._lengths.get(last, 0)
        return aligned(nbytes) - (at_the_end if last + at_the_end == self.size else 0)

    def _free(self, start: int, length: int) -> None:
        position = bisect_left(self._starts, start)
        if position < len(self._starts) and self._starts[position] == start + length:
            length += self._lengths.pop(self._starts.pop(position))
        if (
            position
            and self._starts[position - 1] + self._lengths[self._starts[position - 1]] == start
        ):
            self._lengths[self._starts[position - 1]] += length
        else:
            self._starts.insert(position, start)
            self._lengths[start] = length


def aligned(nbytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
