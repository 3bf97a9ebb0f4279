"""Alignment of rows in memory, where a kernel is given some of all rows.

Note [Rows keep their alignment]. Some kernels read a row in another order if its address has
another alignment, and then sum in another order. So parts begin at multiples of 16 rows: a row of
any length has the alignment there that it has among all rows. Rows that begin elsewhere, as those
of a shifted slice, are copied to where they have it.

Note [No row is alone]. A sum over a single row is split over threads, and its bits depend on that.
So a last part of one row is joined to the part before it.
"""

import torch
from torch import Tensor

from rekindle.torch_private.fake_mode import FakeTensor

ROWS = 16
"""Parts have a multiple of so many rows: Note [Rows keep their alignment]."""
_BYTES = 16
"""Kernels read so many bytes at once, at most."""


def aligned(rows: Tensor, start: int) -> Tensor:
    """Return rows, of which the first is the one at `start` of all, with the alignment of that.

    >>> rows = torch.zeros(4, 5)  # of 20 bytes each
    >>> aligned(rows, 16) is rows, aligned(rows, 17).data_ptr() % 16
    (True, 4)
    """
    if isinstance(rows, FakeTensor) or rows.dim() != 2:
        return rows
    offset = start * rows.shape[1] * rows.element_size()
    if rows.is_contiguous() and (rows.data_ptr() - offset) % _BYTES == 0:
        return rows
    before = start % ROWS
    found = torch.empty((before + len(rows), rows.shape[1]), dtype=rows.dtype, device=rows.device)
    return found[before:].copy_(rows)
