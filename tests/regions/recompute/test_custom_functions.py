"""Custom autograd functions inside a region."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rekindle
from tests.regions.recompute.gradients import assert_same_grads, leaf, replays
from tests.toys import assert_same_step


class TwiceRead(torch.autograd.Function):
    """Reads `ctx.saved_tensors` twice, which torch's own checkpoint refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (once,) = ctx.saved_tensors
        (again,) = ctx.saved_tensors
        assert torch.equal(once, again)
        return grad * again.cos()


class Scale(torch.autograd.Function):
    """Holds a tensor and a number; its double backward goes through autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        out = x.exp()
        ctx.save_for_backward(out)
        ctx.mark_non_differentiable(flag := x > 0)
        return out * factor, flag

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return grad * out * ctx.factor, None


def test_a_custom_function_inside_a_region_gives_the_plain_gradients() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        out, flag = Scale.apply(x.sin(), 3.0)
        return out.cos() * flag

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_a_custom_function_may_read_its_saved_tensors_twice() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        return TwiceRead.apply(x.exp()).cos()

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_reading_saved_tensors_twice_replays_once() -> None:
    x = leaf(3)
    assert (
        replays(lambda: rekindle.checkpoint(lambda x: TwiceRead.apply(x.exp()), x).sum().backward())
        == 1
    )


def test_a_custom_function_may_read_its_saved_tensors_twice_under_retain_graph() -> None:
    x = leaf(3)

    def ways(run: Callable[..., Tensor]) -> list[Tensor | None]:
        x.grad = None
        loss = run(lambda x: TwiceRead.apply(x.exp()).cos(), x).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad]

    assert_same_grads(ways)
