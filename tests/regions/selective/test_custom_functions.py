"""An `autograd.Function` as a unit under a policy."""

import functools
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd

import rekindle
from rekindle.policies import first, keep, named, recompute
from tests.regions.selective.toy_regions import replayed
from tests.toys import assert_same_step, leaf


class Swish(torch.autograd.Function):
    """Four ops; backward needs what goes in and the second result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x * 1.0)
        ctx.save_for_backward(x, gate)
        return x * gate * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, gate = ctx.saved_tensors
        return grad * gate * (1 + x * (1 - gate))


def gated(x: Tensor) -> Tensor:
    return Swish.apply(Swish.apply(x.sin()).exp()).exp()


def test_a_custom_function_can_be_kept_as_a_unit() -> None:
    """Field note 13."""
    x = leaf(4)
    assert replayed(gated, x, recompute()) == 11
    assert replayed(gated, x, keep(Swish)) == 3  # `sin`, and `exp` twice
    run = functools.partial(rekindle.checkpoint, gated, x, context_fn=keep(Swish))
    assert_same_step(lambda: gated(x), run, [x])


def test_a_custom_function_can_be_recomputed_as_a_unit() -> None:
    """Field note 13."""
    assert replayed(gated, leaf(4), recompute(Swish) | keep()) == 4  # `mul`, `sigmoid`, twice


def test_a_custom_function_can_be_counted_and_placed() -> None:
    """Field note 13. The first four ops that the policy speaks of are those of the first call."""
    x = leaf(4)
    assert replayed(gated, x, first(4, keep(Swish))) == 7
    assert replayed(rekindle.name(gated, "g"), x, named("g")) == 0


def test_a_custom_function_with_context_set_up_apart_can_be_kept() -> None:
    """Field note 13."""

    class Apart(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin().exp()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            ctx.save_for_backward(*inputs, output)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            x, out = ctx.saved_tensors
            return grad * x.cos() * out

    x = leaf(4)
    assert replayed(lambda x: Apart.apply(x).cos(), x, recompute()) == 2
    assert replayed(lambda x: Apart.apply(x).cos(), x, keep(Apart)) == 0


def test_a_custom_function_is_not_taken_for_another() -> None:
    """Field note 13. Mixed-precision kernels all have the same decorator around their forward."""

    def kernel() -> Any:
        class Kernel(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type="cuda", cast_inputs=torch.float16)
            def forward(ctx: Any, x: Tensor) -> Tensor:
                y = x.sin()
                ctx.save_for_backward(y)
                return y.exp()

            @staticmethod
            @custom_bwd(device_type="cuda")
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * ctx.saved_tensors[0]

        return Kernel

    one, other = kernel(), kernel()
    assert replayed(one.apply, leaf(4), recompute()) == 1
    assert replayed(one.apply, leaf(4), keep(one)) == 0
    assert replayed(one.apply, leaf(4), keep(other)) == 1
