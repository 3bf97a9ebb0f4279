"""Values per token of a head: by `exact.py` or by `tiled.py`, and in which dtype."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rekindle.losses.exact import values_of_logits
from rekindle.losses.head_tiles import Head
from rekindle.losses.row_function import RowFunction
from rekindle.losses.tiled import values_of_head
from rekindle.losses.tiles import TILED_BYTES, rows_within


def matmul_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of the head's matmul: that of the weight, or the one that autocast casts to."""
    kind = weight.device.type
    if torch.is_autocast_enabled(kind) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return weight.dtype


def loss_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that logits are cast to: float32, or float64 where they are that."""
    return torch.promote_types(matmul_dtype(weight), torch.float32)


def head_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Head:
    """The head with one row per token."""
    return Head(hidden.reshape(-1, hidden.shape[-1]), weight, bias, matmul_dtype(weight))


def tile_rows(weight: Tensor, tile: int | None) -> int:
    """Tokens per tile of a tiled head."""
    itemsize = loss_dtype(weight).itemsize
    return tile or rows_within(TILED_BYTES, len(weight), itemsize)


def values_of_tokens(
    function: RowFunction,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    args: Sequence[Any],
    *,
    exact: bool,
    tile: int | None,
) -> tuple[Any, ...]:
    """Values of `function` on the logits of a head, with a graph; one row per token."""
    if exact:
        logits = functional.linear(hidden, weight, bias).reshape(-1, len(weight))
        return values_of_logits(function, logits, args, rows=tile, owned=True)
    head = head_of(hidden, weight, bias)
    return values_of_head(function, head, args, rows=tile_rows(weight, tile))
