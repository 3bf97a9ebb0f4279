"""Gradients by autograd, of those inputs that have one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rekindle.losses.row_function import Values


def gradients(
    values: Values, inputs: Sequence[Any], grads: Values, *, create_graph: bool = False
) -> list[Tensor | None]:
    """Gradients of `inputs`, None for those without, from those of values that have a graph."""
    pairs = [
        (value, grad)
        for value, grad in zip(values, grads, strict=True)
        if value is not None and grad is not None and value.requires_grad
    ]
    wanted = [_is_wanted(each) for each in inputs]
    if not pairs or not any(wanted):
        return [None] * len(wanted)
    outputs, given = zip(*pairs, strict=True)
    leaves = [each for each, want in zip(inputs, wanted, strict=True) if want]
    found = iter(
        torch.autograd.grad(outputs, leaves, given, create_graph=create_graph, allow_unused=True)
    )
    return [next(found) if want else None for want in wanted]


def _is_wanted(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
