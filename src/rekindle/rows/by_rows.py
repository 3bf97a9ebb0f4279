"""`by_rows`: a module's output as a `RowTensor` of its graph, and the gradient that comes back."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rekindle.rows.chunks import evaluate
from rekindle.rows.expressions import Leaf, Node, Relabeled
from rekindle.rows.row_tensor import RowTensor, row_tensor, whole
from rekindle.torch_private.fake_mode import FakeTensor
from rekindle.torch_private.storages import storage_users

OnGradient = Callable[[int], None]
"""Called in backward with the bytes that the copies and gradients of logits would have taken at
most; 0 if the gradient did not come by rows."""


def by_rows(logits: Tensor, on_gradient: OnGradient | None = None) -> Tensor:
    """Logits whose copies, losses and gradients are computed a few rows at a time.

    They are a tensor like any other: whatever does not go row by row gets all of them.

    >>> logits = torch.randn(6, 5, requires_grad=True)
    >>> loss = torch.nn.functional.cross_entropy(by_rows(logits * 1), torch.arange(6) % 5)
    >>> loss.backward()
    >>> plain = logits.detach().requires_grad_()
    >>> torch.nn.functional.cross_entropy(plain * 1, torch.arange(6) % 5).backward()
    >>> torch.equal(logits.grad, plain.grad)
    True
    """
    if not goes_by_rows(logits):
        return logits
    found: Tensor = _Enter.apply(logits, on_gradient)  # type: ignore[no-untyped-call]
    return found


def goes_by_rows(value: Any) -> bool:
    """True for a tensor that may be taken row by row: it has several rows, and a gradient."""
    return (
        type(value) in (Tensor, FakeTensor)
        and torch.is_grad_enabled()
        and value.requires_grad
        and value.is_floating_point()
        and value.layout is torch.strided
        and value.dim() > 1
        and value.is_contiguous()
        and value.numel() > value.shape[-1]
    )


class _Enter(Function):
    """The identity, into row tensors."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, on_gradient: OnGradient | None) -> Tensor:
        made = row_tensor(logits.detach())
        ctx.leaf, ctx.on_gradient = made.node, on_gradient
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        leaf, ctx.leaf = ctx.leaf, None
        if ctx.on_gradient is not None:
            is_lazy = isinstance(grad, RowTensor) and grad.node.real is None
            ctx.on_gradient(leaf.most_saved if is_lazy and leaf is not None else 0)
        if isinstance(grad, RowTensor):
            grad = _Leave.apply(grad, leaf)  # type: ignore[no-untyped-call]
        return grad, None


class _Leave(Function):
    """The identity, from row tensors: where a gradient is needed as a whole."""

    @staticmethod
    def forward(_ctx: Any, grad: RowTensor, leaf: Leaf | None) -> Tensor:
        node = grad.node
        if node.real is None and leaf is not None and _is_last_reader(grad, leaf):
            real = evaluate(node, into=leaf)
            for each in _with_same_rows(node):
                each.real = real.view(each.meta.shape)
        return whole(grad).detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _with_same_rows(node: Node) -> list[Node]:
    """A node, and those that it is a view of with all of their rows."""
    found = [node]
    while isinstance(node, Relabeled) and node.as_view is not None:
        (node,) = node.children
        if not node.meta.is_contiguous():
            break
        found.append(node)
    return found


def _is_last_reader(grad: RowTensor, leaf: Leaf) -> bool:
    """True if nobody but a gradient can read a leaf: Note [Who reads logits].

    A tensor that the gradient is a view of has the same rows, so it needs the leaf no more either:
    autograd holds it for the view.
    """
    same = _with_same_rows(grad.node)
    if any(reader.node not in same for reader in list(leaf.users.values())):
        return False
    return storage_users(leaf.tensor.untyped_storage()) <= _OWN_USERS


_OWN_USERS = 2
"""The leaf's tensor, and the object that was made to ask."""
