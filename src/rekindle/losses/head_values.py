"""Values per token of a head: by `exact.py` or by `tiled.py`, and in which dtype."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rekindle.losses import graph_ops
from rekindle.losses.cross_entropy import CrossEntropy
from rekindle.losses.exact import values_of_logits
from rekindle.losses.head_tiles import Head
from rekindle.losses.log_prob_rows import LogProbRows
from rekindle.losses.row_function import RowFunction
from rekindle.losses.summed import sum_of_head
from rekindle.losses.tiled import values_of_head
from rekindle.losses.tiles import EXACT_BYTES, TILED_BYTES, rows_within
from rekindle.torch_private.func_transforms import func_transform


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


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The logits of all tokens, one row per token."""
    return functional.linear(hidden, weight, bias).reshape(-1, weight.shape[0])


def exact_rows(weight: Tensor, tile: int | None) -> int:
    """Tokens per tile of logits that are there."""
    return tile or rows_within(EXACT_BYTES, weight.shape[0], loss_dtype(weight).itemsize)


def tile_rows(weight: Tensor, tile: int | None) -> int:
    """Tokens per tile of a head."""
    return tile or rows_within(TILED_BYTES, weight.shape[0], loss_dtype(weight).itemsize)


def cross_entropy_of_tokens(
    loss: CrossEntropy,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    args: tuple[Tensor, Tensor | None],
    *,
    exact: bool,
    tile: int | None,
) -> Tensor:
    """The loss of labels and class weights on the logits of a head, with a graph."""
    classes, dtype = weight.shape[0], loss_dtype(weight)
    in_graph = torch.compiler.is_compiling()
    if exact or loss.reduction == "none" or not (in_graph or func_transform() is None):
        rows = loss.rows(dtype)
        values = values_of_tokens(rows, hidden, weight, bias, args, exact=exact, tile=tile)
        return loss.reduce(values, *args, classes)
    head, rows_of_tile = head_of(hidden, weight, bias), tile_rows(weight, tile)
    if in_graph:
        return graph_ops.sum_of_head(loss, head, args, rows_of_tile)
    return sum_of_head(loss.as_sum(*args, classes, dtype), head, args, rows=rows_of_tile)


def values_of_tokens(
    function: LogProbRows,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    args: Sequence[Any],
    *,
    exact: bool,
    tile: int | None,
) -> Sequence[Any]:
    """Values of `function` on the logits of a head, with a graph; one row per token."""
    if torch.compiler.is_compiling():
        if exact:
            logits = logits_of(hidden, weight, bias)
            return graph_ops.values_of_logits(function, logits, args, exact_rows(weight, tile))
        head = head_of(hidden, weight, bias)
        return graph_ops.values_of_head(function, head, args, tile_rows(weight, tile))
    if func_transform() is not None:  # transforms go through plain ops
        return function.plain(logits_of(hidden, weight, bias), args)
    return run_rows(function, hidden, weight, bias, args, exact=exact, tile=tile)


def run_rows(
    function: RowFunction,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    args: Sequence[Any],
    *,
    exact: bool,
    tile: int | None,
) -> Sequence[Any]:
    """Values of any row function, with a graph; not in graphs that torch makes."""
    if exact:
        logits, rows = logits_of(hidden, weight, bias), exact_rows(weight, tile)
        return values_of_logits(function, logits, args, rows=rows, owned=True)
    head = head_of(hidden, weight, bias)
    return values_of_head(function, head, args, rows=tile_rows(weight, tile))
