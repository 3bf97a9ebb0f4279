"""Values per token by tiles of a head: no more than a tile of logits is there at any time.

Backward runs each tile again, as it needs the gradients of the values first. `summed.py` does
without where the values are summed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rekindle.losses.head_tiles import Head, HeadGradients
from rekindle.losses.row_function import (
    RowFunction,
    Values,
    join,
    join_gradients,
    rows_of,
    save_args,
    saved_args,
)
from rekindle.losses.tiles import tiles_of


def values_of_head(
    function: RowFunction, head: Head, args: Sequence[Any], *, rows: int
) -> tuple[Any, ...]:
    """Values per token of the logits of a head, with a graph, `rows` at a time."""
    values: tuple[Any, ...] = _ByTiles.apply(  # type: ignore[no-untyped-call]
        function, rows, head.dtype, head.hidden, head.weight, head.bias, *args
    )
    return values


class _ByTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: RowFunction,
        rows: int,
        dtype: torch.dtype,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *args: Any,
    ) -> tuple[Tensor | None, ...]:
        ctx.function, ctx.rows, ctx.dtype = function, rows, dtype
        save_args(ctx, (hidden, weight, bias, *args))
        ctx.set_materialize_grads(False)
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head(hidden, weight, bias, dtype).in_dtype()
            return join(
                [
                    function.forward(head.logits(tile), rows_of(function, args, tile))
                    for tile in tiles_of(len(hidden), rows)
                ]
            )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        function: RowFunction = ctx.function
        hidden, weight, bias, *args = saved_args(ctx)
        of_args: list[Values] = []
        with torch.autocast(hidden.device.type, enabled=False):
            head = Head(hidden, weight, bias, ctx.dtype).in_dtype()
            found = HeadGradients(head, ctx.needs_input_grad[3:6])
            for tile in tiles_of(len(hidden), ctx.rows):
                _, pullback = function.vjp(head.logits(tile), rows_of(function, args, tile))
                of_logits, of_tile = pullback([g if g is None else g[tile] for g in grads])
                del pullback  # with the tiles that it holds
                found.add(of_logits, tile, head)
                of_args.append(of_tile)
                del of_logits
        of_head = found.in_dtypes_of(hidden, weight, bias)
        return None, None, None, *of_head, *join_gradients(function, of_args)
