"""Ops of a program that take more than a line: attention, hooks, gradients within a forward."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class _SavesBoth(torch.autograd.Function):
    """Saves its input and its output; can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sigmoid()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * (y * (1 - y) + 0.0 * x)


class _SavesNothing(torch.autograd.Function):
    """Keeps what it needs as an attribute, behind the back of every hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        ctx.sign, ctx.k = x.sign(), k
        return x.abs() * k

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.sign * ctx.k, None


def saves_both(x: Tensor) -> Any:
    return _SavesBoth.apply(x)  # type: ignore[no-untyped-call]


def saves_nothing(x: Tensor, k: int) -> Any:
    return _SavesNothing.apply(x, k)  # type: ignore[no-untyped-call]


def through_complex(x: Tensor) -> Tensor:
    z: Tensor = torch.fft.fft(x.float()) * torch.polar(torch.ones_like(x.float()), x.float())
    return (z * z.conj() + z).real + z.abs()


def attention(x: Tensor, k: int) -> Tensor:
    heads = x.unsqueeze(0).unsqueeze(0) if x.dim() == 2 else x.unsqueeze(0)
    return functional.scaled_dot_product_attention(
        heads, heads * 0.5, heads, is_causal=bool(k % 2)
    )[0]


def inner_grad(x: Tensor) -> Tensor:
    """A gradient that is computed and used in the region."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((leaf.sin() * leaf).sum(), leaf)
    return x * slope


def grad_of(k: int, y: Tensor, x: Tensor) -> Tensor:
    """The gradient of one variable by another, through whatever lies between."""
    if not (y.requires_grad and x.requires_grad and torch.is_grad_enabled()):
        return torch.zeros_like(x)
    (slope,) = torch.autograd.grad(
        y.sum(), x, retain_graph=True, create_graph=bool(k % 2), allow_unused=True
    )
    return torch.zeros_like(x) if slope is None else slope


def hooked(x: Tensor, k: int) -> Tensor:
    y = x.view_as(x)
    if y.requires_grad:
        y.register_hook(lambda grad: None if grad is None else grad * (k + 1))
    return y


def reseeded(x: Tensor, k: int) -> Tensor:
    torch.manual_seed(k)
    return x + torch.rand_like(x)


def gates(world: Any, x: Tensor) -> Tensor:
    """A recurrent cell's arithmetic: chunks of one storage, each changed in place and saved."""
    a, b, c = world.gates(x).unsafe_chunk(3, -1)
    out: Tensor = a.sigmoid_() * x + b.tanh_() * c.sigmoid_()
    return out


def projected(world: Any, x: Tensor) -> Tensor:
    """An LSTM with projections, of which torch says that oneDNN does not know it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out: Tensor = world.lstm_projected(x)[0]
    return out
