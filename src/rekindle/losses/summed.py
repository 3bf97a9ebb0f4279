"""A loss that is a sum over tokens, by tiles of a head, with its gradient made in forward.

Each tile of logits is there once: its values, its gradient, and what it adds to the gradients of
hidden states and weight. Backward only scales them.

Note [The scale is a power of two]. The gradient that comes from above is not known in forward: it
is 1, or the scale of a gradient scaler. And the total that a mean is divided by makes gradients too
small for float16. So forward divides by a number from 1 to 2, and backward multiplies by a power of
two, times the gradient from above: exact, if that is a power of two as well.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rekindle.errors import RekindleError
from rekindle.losses.head_tiles import Head, HeadGradients
from rekindle.losses.row_function import RowFunction, Values, join, rows_of
from rekindle.losses.tiles import tiles_of
from rekindle.torch_private.autograd_graph import keep_graph


class Sum(NamedTuple):
    """A sum over tokens: of each value times its coefficient, divided by a total."""

    function: RowFunction
    coefficients: Sequence[float]
    """By value; 0 for one that is not there."""
    total: Tensor
    """Without dimensions."""
    finish: Callable[[Values], Tensor]
    """Computes the sum from the values of all tokens."""


def sum_of_head(of: Sum, head: Head, args: Sequence[Any], *, rows: int) -> Tensor:
    """The sum over all tokens, with a graph; the arguments get no gradients."""
    tensors = head.hidden, head.weight, head.bias
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        loss: Tensor = _Summed.apply(  # type: ignore[no-untyped-call]
            of, rows, head.dtype, args, *tensors
        )
        return loss
    return sum_by_tiles(of, head, args, rows, None)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        of: Sum,
        rows: int,
        dtype: torch.dtype,
        args: Sequence[Any],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        head = Head(hidden, weight, bias, dtype)
        found = HeadGradients(head, ctx.needs_input_grad[4:])
        loss = sum_by_tiles(of, head, args, rows, found)
        ctx.dtypes = [
            tensor if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)
        ]
        ctx.save_for_backward(found.hidden, found.weight, found.bias, power_of_two(of.total))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RekindleError(
                "A tiled loss has no second derivative: its gradient was made in forward. Call "
                "linear_cross_entropy with exact=True, or backward without create_graph=True."
            )
        *found, power = ctx.saved_tensors
        scale, last = grad / power, not keep_graph()
        return (
            None,
            None,
            None,
            None,
            *(
                g if g is None else (g.mul_(scale) if last else g * scale).to(dtype)
                for g, dtype in zip(found, ctx.dtypes, strict=True)
            ),
        )


def sum_by_tiles(
    of: Sum, head: Head, args: Sequence[Any], rows: int, found: HeadGradients | None
) -> Tensor:
    """The sum; and `found` gets the gradients, each times the power of two of the total."""
    tiles: list[Values] = []
    with torch.autocast(head.hidden.device.type, enabled=False):
        scale = power_of_two(of.total) / of.total  # Note [The scale is a power of two]
        head = head.in_dtype()
        for tile in tiles_of(len(head.hidden), rows):
            given = rows_of(of.function, args, tile)
            if found is None:
                tiles.append(of.function.forward(head.logits(tile), given))
                continue
            values, pullback = of.function.vjp(head.logits(tile), given)
            grads = [
                value if value is None else (scale * factor).expand_as(value)
                for value, factor in zip(values, of.coefficients, strict=True)
            ]
            of_logits, _ = pullback(grads)
            del pullback  # with the tiles that it holds
            found.add(of_logits, tile, head)
            del of_logits
            tiles.append(values)
        return of.finish(join(tiles))


def power_of_two(total: Tensor) -> Tensor:
    """The power of two that is `total`, or next above it; 1 for 0."""
    mantissa, _ = torch.frexp(total)
    return torch.where(total == 0, torch.ones_like(total), total / mantissa)
