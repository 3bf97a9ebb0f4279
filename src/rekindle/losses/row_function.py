"""The contract of a function of rows of logits, and its arguments, whole and by tiles."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

Values: TypeAlias = Sequence[Tensor | None]
"""Values per token, or gradients: None for one that was not asked for, or that has no gradient."""

Pullback: TypeAlias = Callable[[Values], tuple[Tensor, Values]]
"""From gradients of the values to the gradient of the logits, and that of each argument."""


class RowFunction(Protocol):
    """Computes values per token from rows of logits, each row by itself.

    `args` are tensors with a row per token, tensors that every tile gets whole, and other objects.
    """

    @property
    def by_token(self) -> Sequence[bool]:
        """True for each argument that has a row per token."""

    def forward(self, logits: Tensor, args: Sequence[Any]) -> Values:
        """Values, each with a row per row of `logits`."""

    def plain(self, logits: Tensor, args: Sequence[Any]) -> Values:
        """The values with a graph, as if autograd ran the function as it is."""

    def vjp(self, logits: Tensor, args: Sequence[Any]) -> tuple[Values, Pullback]:
        """Values, and the function that gives back their gradients; outside of autograd."""


def rows_of(function: RowFunction, args: Sequence[Any], tile: slice) -> list[Any]:
    """The arguments of a tile."""
    return [arg[tile] if by else arg for arg, by in zip(args, function.by_token, strict=True)]


def join(tiles: Sequence[Values]) -> tuple[Tensor | None, ...]:
    """Values of all tokens from those of tiles."""
    return tuple(_each(torch.cat, values) for values in zip(*tiles, strict=True))


def join_gradients(function: RowFunction, tiles: Sequence[Values]) -> tuple[Tensor | None, ...]:
    """Gradients of arguments from those of tiles: joined by token, or summed."""
    columns = zip(*tiles, strict=True)
    return tuple(
        _each(torch.cat if by else _sum, grads)
        for grads, by in zip(columns, function.by_token, strict=True)
    )


def _each(
    merge: Callable[[list[Tensor]], Tensor], values: Sequence[Tensor | None]
) -> Tensor | None:
    """One tensor from those of tiles; None where there are none."""
    present = [value for value in values if value is not None]
    return merge(present) if present else None


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def save_args(ctx: Any, args: Sequence[Any]) -> None:
    """Save arguments for backward: tensors by autograd, other objects as they are."""
    ctx.others = [None if isinstance(arg, Tensor) else arg for arg in args]
    ctx.places = [place for place, arg in enumerate(args) if isinstance(arg, Tensor)]
    ctx.save_for_backward(*(args[place] for place in ctx.places))


def saved_args(ctx: Any) -> list[Any]:
    """The arguments that `save_args` saved."""
    args = list(ctx.others)
    for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
        args[place] = tensor
    return args
