"""Tables of what a page's document has many times: everything refers to them by index."""

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)


class Table(Generic[_Key]):
    """Distinct values in the order in which they were first asked for."""

    def __init__(self) -> None:
        self._indices: dict[_Key, int] = {}

    def index(self, value: _Key) -> int:
        """The index of a value, which is added if it is new."""
        return self._indices.setdefault(value, len(self._indices))

    def indices(self, values: Sequence[_Key]) -> list[int]:
        """The indices of several values."""
        return [self.index(value) for value in values]

    def values(self) -> list[_Key]:
        """The values, by index."""
        return list(self._indices)


def rounded(seconds: float) -> float:
    """Seconds with six digits that count: more than a chart shows.

    >>> rounded(0.0123456789)
    0.0123457
    """
    return float(f"{seconds:.6g}")
