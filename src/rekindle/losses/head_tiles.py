"""The matmuls of a head on a tile of tokens: logits, and the gradients of what made them.

Note [Gradients of weights are summed in float32]. Each tile adds to the weight's gradient. In the
weight's own dtype, bfloat16 say, every addition would round; so products and sums are in float32,
and the result is rounded once, as a whole matmul does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Head:
    """A linear head: `hidden` is (tokens, features), `weight` (classes, features)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    """The dtype of the matmul: under autocast another than that of the tensors."""

    def in_dtype(self) -> "Head":
        """The head with weight and bias cast to the dtype of the matmul, as long as it is held."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return Head(self.hidden, self.weight.to(self.dtype), bias, self.dtype)

    def all_logits(self) -> Tensor:
        with torch.autocast(self.hidden.device.type, enabled=False):
            return self.in_dtype().logits(slice(None))

    def logits(self, tile: slice) -> Tensor:
        return functional.linear(self.hidden[tile].to(self.dtype), self.weight, self.bias)


class HeadGradients:
    """Gradients of a head's tensors, tile by tile; None for those that are not wanted."""

    def __init__(self, head: Head, wanted: tuple[bool, bool, bool]) -> None:
        of_hidden, of_weight, of_bias = wanted
        wide = torch.promote_types(head.dtype, torch.float32)
        self.hidden = torch.empty_like(head.hidden) if of_hidden else None
        self.weight = torch.zeros_like(head.weight, dtype=wide) if of_weight else None
        self.bias = None
        if of_bias and head.bias is not None:
            self.bias = torch.zeros_like(head.bias, dtype=wide)

    def add(self, grad: Tensor, tile: slice, head: Head) -> None:
        """Add what a tile gives, from the gradient of its logits."""
        if self.hidden is not None:
            self.hidden[tile] = grad @ head.weight
        if self.weight is not None:
            _add_product(self.weight, grad.t(), head.hidden[tile].to(grad.dtype))
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)

    def in_dtypes_of(self, *tensors: Tensor | None) -> list[Tensor | None]:
        """The gradients in the dtypes of hidden states, weight and bias, of which this lets go."""
        found = [self.hidden, self.weight, self.bias]
        self.hidden = self.weight = self.bias = None
        return [
            None if grad is None or tensor is None else grad.to(tensor.dtype)
            for grad, tensor in zip(found, tensors, strict=True)
        ]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, summed in the dtype of `total`."""
    if a.dtype != total.dtype and a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
