"""A small head, its plain cross entropy written out, and steps that are compared."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CLASSES, FEATURES = 103, 16
LEADING = 3, 15
"""Of the tokens: 45, which no tile size of the tests divides."""


def head(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and bias, as leaves."""
    torch.manual_seed(seed)
    shapes = (*LEADING, FEATURES), (CLASSES, FEATURES), (CLASSES,)
    hidden, weight, bias = (torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes)
    return hidden, weight, bias


def some_labels(ignored: float = 0.3, seed: int = 1) -> Tensor:
    """Class indices, a share of them ignored."""
    torch.manual_seed(seed)
    labels = torch.randint(CLASSES, LEADING)
    return labels.masked_fill(torch.rand(LEADING) < ignored, -100)


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The same loss as anyone would write it."""
    logits = functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    flat = labels.flatten()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    loss = functional.cross_entropy(
        logits,
        flat,
        class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    if z_loss:
        counts = flat != ignore_index
        square = torch.logsumexp(logits, -1).square()
        total = counts.sum()
        if class_weight is not None:
            square = square * class_weight[flat.masked_fill(~counts, 0)]
            total = class_weight[flat[counts]].sum()
        square = square.masked_fill(~counts, 0)
        if reduction != "none":
            square = square.sum() / total if reduction == "mean" else square.sum()
        loss = loss + z_loss * square
    return loss.reshape(labels.shape) if reduction == "none" else loss


def step(
    run: Callable[[], Any], leaves: Sequence[Tensor], scale: float = 1.0
) -> tuple[Tensor, ...]:
    """The loss, and the gradient of each leaf after a backward from `scale` times it."""
    for each in leaves:
        each.grad = None
    loss = run()
    (loss * scale).sum().backward()
    grads = [each.grad for each in leaves]
    assert all(grad is not None for grad in grads)
    return loss.detach(), *(grad.clone() for grad in grads if grad is not None)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """The norm of the error over the norm of what is right."""
    right = exact.detach().double()
    return float((found.detach().double() - right).norm() / right.norm())
