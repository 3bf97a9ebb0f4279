"""Values per token by tiles of a head: no more than a tile of logits is there at any time.

Backward runs each tile again, as it needs the gradients of the values first. `summed.py` does
without where the values are summed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rekindle.losses.gradients import gradients
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
        return forward_by_tiles(function, Head(hidden, weight, bias, dtype), args, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, *args = inputs = saved_args(ctx)
        head = Head(hidden, weight, bias, ctx.dtype)
        if torch.is_grad_enabled():  # backward with `create_graph=True`: by plain ops
            values = ctx.function.plain(head.all_logits(), args)
            return None, None, None, *gradients(values, inputs, grads, create_graph=True)
        found = HeadGradients(head, ctx.needs_input_grad[3:6])
        of_args = backward_by_tiles(ctx.function, head, args, ctx.rows, grads, found)
        return None, None, None, *found.in_dtypes_of(hidden, weight, bias), *of_args


def forward_by_tiles(
    function: RowFunction, head: Head, args: Sequence[Any], rows: int
) -> tuple[Tensor | None, ...]:
    """Values of all tokens, without a graph."""
    with torch.autocast(head.hidden.device.type, enabled=False):
        head = head.in_dtype()
        return join(
            [
                function.forward(head.logits(tile), rows_of(function, args, tile))
                for tile in tiles_of(len(head.hidden), rows)
            ]
        )


def backward_by_tiles(
    function: RowFunction,
    head: Head,
    args: Sequence[Any],
    rows: int,
    grads: Values,
    found: HeadGradients,
) -> tuple[Tensor | None, ...]:
    """Gradients of the arguments; those of the head are added to `found`."""
    of_args: list[Values] = []
    with torch.autocast(head.hidden.device.type, enabled=False):
        head = head.in_dtype()
        for tile in tiles_of(len(head.hidden), rows):
            _, pullback = function.vjp(head.logits(tile), rows_of(function, args, tile))
            of_logits, of_tile = pullback([g if g is None else g[tile] for g in grads])
            del pullback  # with the tiles that it holds
            found.add(of_logits, tile, head)
            del of_logits
            of_args.append(of_tile)
    return join_gradients(function, of_args)
