"""Values per token by rows of logits that are there: gradients bit for bit those of the plain run.

Forward holds the logits and nothing else of their size. Backward writes their gradient over them,
tile by tile: at its peak there is one tensor of the logits' size and a few tiles.

Note [Who may write over logits]. Backward may if the logits were made for this call and are used by
nothing else, which the caller says (`owned`); and if it runs for the last time, which the engine
says: with `retain_graph=True` the gradient has its own memory. Saved-tensor hooks are no danger: a
region replays logits for each backward, and an offloader returns a copy or the logits themselves.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rekindle.losses.row_function import (
    RowFunction,
    Values,
    join,
    join_gradients,
    rows_of,
    save_args,
    saved_args,
)
from rekindle.losses.tiles import EXACT_BYTES, rows_within, tiles_of
from rekindle.torch_private.autograd_graph import keep_graph


def values_of_logits(
    function: RowFunction,
    logits: Tensor,
    args: Sequence[Any],
    *,
    rows: int | None = None,
    owned: bool = False,
) -> tuple[Any, ...]:
    """Values per token of `logits` (tokens, classes), with a graph, `rows` at a time.

    `owned` says that nothing else uses the logits: Note [Who may write over logits].
    """
    if rows is None:
        rows = rows_within(EXACT_BYTES, logits.shape[1], max(logits.itemsize, 4))
    values: tuple[Any, ...] = _ByRows.apply(  # type: ignore[no-untyped-call]
        function, rows, owned, logits, *args
    )
    return values


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: RowFunction, rows: int, owned: bool, logits: Tensor, *args: Any
    ) -> tuple[Tensor | None, ...]:
        ctx.function, ctx.rows, ctx.owned = function, rows, owned
        save_args(ctx, (logits, *args))
        ctx.set_materialize_grads(False)
        return join(
            [
                function.forward(logits[tile], rows_of(function, args, tile))
                for tile in tiles_of(len(logits), rows)
            ]
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        function: RowFunction = ctx.function
        logits, *args = saved_args(ctx)
        grad = logits if ctx.owned and not keep_graph() else torch.empty_like(logits)
        of_args: list[Values] = []
        for tile in tiles_of(len(logits), ctx.rows):
            _, pullback = function.vjp(logits[tile], rows_of(function, args, tile))
            of_logits, of_tile = pullback([g if g is None else g[tile] for g in grads])
            del pullback  # with the tiles that it holds
            grad[tile] = of_logits
            del of_logits
            of_args.append(of_tile)
        return None, None, None, grad, *join_gradients(function, of_args)
