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

from rekindle.losses.gradients import gradients
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
from rekindle.torch_private.autograd_graph import keep_graph


def values_of_logits(
    function: RowFunction,
    logits: Tensor,
    args: Sequence[Any],
    *,
    rows: int,
    owned: bool = False,
) -> tuple[Any, ...]:
    """Values per token of `logits` (tokens, classes), with a graph, `rows` at a time.

    `owned` says that nothing else uses the logits: Note [Who may write over logits].
    """
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
        return forward_by_rows(function, logits, args, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        logits, *args = saved_args(ctx)
        if torch.is_grad_enabled():  # backward with `create_graph=True`: by plain ops
            values = ctx.function.plain(logits, args)
            return None, None, None, *gradients(values, (logits, *args), grads, create_graph=True)
        out = logits if ctx.owned and not keep_graph() else torch.empty_like(logits)
        of_args = backward_by_rows(ctx.function, logits, args, ctx.rows, grads, out)
        return None, None, None, out, *of_args


def forward_by_rows(
    function: RowFunction, logits: Tensor, args: Sequence[Any], rows: int
) -> tuple[Tensor | None, ...]:
    """Values of all tokens, without a graph."""
    return join(
        [
            function.forward(logits[tile], rows_of(function, args, tile))
            for tile in tiles_of(len(logits), rows)
        ]
    )


def backward_by_rows(
    function: RowFunction,
    logits: Tensor,
    args: Sequence[Any],
    rows: int,
    grads: Values,
    out: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of the arguments; that of the logits is written to `out`, which may be they."""
    of_args: list[Values] = []
    for tile in tiles_of(len(logits), rows):
        _, pullback = function.vjp(logits[tile], rows_of(function, args, tile))
        of_logits, of_tile = pullback([g if g is None else g[tile] for g in grads])
        del pullback  # with the tiles that it holds
        out[tile] = of_logits
        del of_logits
        of_args.append(of_tile)
    return join_gradients(function, of_args)
