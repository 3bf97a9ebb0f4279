"""Tiles of tokens: how many rows one has, and where each begins and ends.

Tiles have a multiple of `ROWS` rows, unless a user says how many, and a last one of one row is
joined to the one before it: the notes in rows/alignment.py say why.
"""

from collections.abc import Iterator

from rekindle.rows.alignment import ROWS

EXACT_BYTES = 32 * 2**20
"""Bytes of a tile of `exact.py`, in the dtype of the loss: enough to keep a GPU busy, and few
enough to stay in its cache from one op to the next."""

TILED_BYTES = 512 * 2**20
"""Bytes of a tile of `tiled.py` and `summed.py`, in the dtype of the loss: each tile reads the
weight and adds to its gradient, which takes about a thousand rows to be worth it."""


def rows_within(nbytes: int, columns: int, itemsize: int) -> int:
    """Rows of a tile of at most `nbytes`, at least 16.

    >>> rows_within(32 * 2**20, 128256, 4)
    64
    """
    return max(nbytes // (max(columns, 1) * itemsize) // ROWS, 1) * ROWS


def tiles_of(count: int, rows: int) -> Iterator[slice]:
    """Consecutive slices of `rows` out of `count`; one that is empty if there are none.

    >>> list(tiles_of(7, 3))
    [slice(0, 3, None), slice(3, 7, None)]
    """
    start = 0
    while True:
        end = start + rows
        if end >= count - (rows > 1):  # Note [No row is alone]
            yield slice(start, count)
            return
        yield slice(start, end)
        start = end
