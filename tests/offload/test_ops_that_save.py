"""Ops and functions with ways of their own to save tensors are plain under offload."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.offload.as_plain import assert_plain_gradients, branching, padded
from tests.offloading import STEPS, leaf, spilling
from tests.toys import assert_same_step

pytestmark = pytest.mark.usefixtures("new_offloaders", "written_at_once")


def test_rrelu_whose_noise_is_filled_after_it_is_saved_is_plain() -> None:
    x = leaf(4000)

    def run() -> Tensor:
        h = x * 1.5
        for _ in range(6):
            h = functional.rrelu(h, training=True).sin()
        return h

    assert_plain_gradients(run, [x])


def test_rrelu_on_one_line_is_plain() -> None:
    x = leaf(4000)
    rrelu = nn.RReLU()
    run = lambda: padded(rrelu(rrelu(rrelu(rrelu(x * 1.5)))))  # noqa: E731
    assert_plain_gradients(run, [x])


def test_rrelu_in_place_is_plain() -> None:
    x = leaf(4000)
    rrelu = nn.RReLU(inplace=True)
    run = lambda: padded(rrelu(rrelu(x * 1.5).sin()).sin())  # noqa: E731
    assert_plain_gradients(run, [x])


class Meanwhile(TorchDispatchMode):
    """Has another thread do something after an op has saved its tensors, before it runs."""

    def __init__(self, op: str, work: Callable[[], None]) -> None:
        super().__init__()
        self.op, self.work = op, work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.op in str(func):
            thread = threading.Thread(target=self.work)
            thread.start()
            thread.join()
        return func(*args, **(kwargs or {}))


def test_rrelu_is_plain_while_another_thread_runs_its_forward() -> None:
    """The other thread, under the same options, must not send noise that is not filled yet."""
    x, y = leaf(64), leaf(64)
    others: list[Tensor] = []

    def other() -> None:
        with spilling():
            others.append(padded(y))

    def run() -> Tensor:
        return padded(padded(functional.rrelu(x * 1.5, training=True)))

    def offloaded(mode: AbstractContextManager[Any]) -> Tensor:
        with spilling(), mode:
            return run()

    for seed in range(STEPS):  # learns that noise is moved
        assert_same_step(run, lambda: offloaded(nullcontext()), [x], seed=seed)
    for seed in range(STEPS):
        mode = Meanwhile("rrelu_with_noise", other)
        assert_same_step(run, lambda: offloaded(mode), [x], seed=seed)  # noqa: B023
        others.clear()


class Swish(torch.autograd.Function):
    """Saves an input, a result, a tensor of its own, and something that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        gate = torch.sigmoid(x)
        out = x * gate * scale
        ctx.save_for_backward(x, gate, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, gate, out = ctx.saved_tensors
        return grad * (ctx.scale * gate + out * (1 - gate)) + 0 * x, None


def test_an_autograd_function_is_plain() -> None:
    x = leaf(64)

    def run() -> Tensor:
        h = x
        for _ in range(4):
            h = Swish.apply(h + 1, 0.5)
        return padded(h)

    assert_plain_gradients(run, [x])


class Scribbles(torch.autograd.Function):
    """Computes its gradient in forward, and scales what it saved in place in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        return saved.mul_(grad)


def test_a_function_that_writes_on_what_it_saved_is_plain() -> None:
    x = leaf(64)

    def run() -> Tensor:
        h = x
        for _ in range(6):
            h = Scribbles.apply(h)
        return padded(h)

    assert_plain_gradients(run, [x])


class Chunked(torch.autograd.Function):
    """A loss in chunks: each chunk's gradient is taken while the forward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        grads, losses = [], []
        for chunk in x.chunk(3):
            with torch.enable_grad():
                part = chunk.detach().requires_grad_()
                loss = branching(part, w.detach()).sum()
                grads += torch.autograd.grad(loss, part)
            losses.append(loss.detach())
        ctx.save_for_backward(torch.cat(grads))
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.saved_tensors[0] * grad, None


def test_a_function_that_takes_gradients_in_its_forward_is_plain() -> None:
    x, w = leaf(24, 8), leaf(8, 8)
    assert_plain_gradients(lambda: Chunked.apply(padded(padded(x)), w), [x])
