"""Tiles of tokens: how many rows one has, and where each begins and ends.

Note [Rows keep their alignment]. Some kernels read a row in another order if its address has
another alignment, and then sum in another order. So tiles begin at multiples of 16 rows: a row of
any length has the alignment there that it has among all rows.

Note [No row is alone]. A sum over a single row is split over threads, and its bits depend on that.
So a last tile of one row is joined to the tile before it.
"""

from collections.abc import Iterator

ROWS = 16
"""Tiles have a multiple of so many rows, unless a user says how many: Note [Rows keep their
alignment]."""

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
