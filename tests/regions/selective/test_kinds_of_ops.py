"""Ops of every sort in a region under a policy: custom, higher-order, functions, attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from rekindle import policies
from tests.regions.selective.toy_regions import check

sdpa = functional.scaled_dot_product_attention
dynamo_looks_at_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def _custom(name: str, function: Callable[..., Any], **options: Any) -> Any:
    op = torch.library.custom_op(f"rekindle_ops::{name}", function, mutates_args=(), **options)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return sum(grad * x.cos() for grad in grads)

    op.register_autograd(backward, setup_context=setup)
    return op


def _wave(x: Tensor) -> Tensor:
    return x.sin()


def _noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def _two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.exp() + x.sin()


def _many(x: Tensor) -> list[Tensor]:
    return [x.sin(), x + 1]


def _other_in_no_grad(x: Tensor) -> Tensor:
    return x * (2 if torch.is_grad_enabled() else 3)


wave = _custom("wave", _wave)
noise = _custom("noise", _noise)
two = _custom("two", _two)
other_in_no_grad = _custom("other_in_no_grad", _other_in_no_grad)
many = torch.library.custom_op("rekindle_ops::many", _many, mutates_args=())


@torch.library.custom_op("rekindle_ops::double_", mutates_args=["x"])
def double_(x: Tensor) -> None:
    x.mul_(2)


@pytest.mark.parametrize("op", [wave, noise, other_in_no_grad], ids=lambda op: op._name)
def test_a_custom_op_with_a_formula(policy: policies.Policy, op: Any, x: Tensor) -> None:
    check(policy, lambda x: op(x.exp()).sin() * op(x), x)


def test_a_custom_op_with_two_results_of_which_one_is_used(
    policy: policies.Policy, x: Tensor
) -> None:
    check(policy, lambda x: two(x.exp())[1].sin(), x)


def test_a_custom_op_that_returns_a_list(policy: policies.Policy, x: Tensor) -> None:
    check(policy, lambda x: x * many(x.detach().exp())[0].cos(), x)


def test_a_custom_op_that_changes_its_argument(policy: policies.Policy, x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        buffer = x.detach().sin()
        before = buffer * 3
        double_(buffer)
        return x * buffer + (x + before).exp()

    check(policy, region, x)


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Contrived: torch refuses the backward on a CPU, for want of a kernel, but can do it."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *args: None)
    monkeypatch.setattr(flex_attention, "_warn_once", lambda *args, **kwargs: None)
    return flex_attention.flex_attention


@dynamo_looks_at_grad
def test_flex_attention_with_a_block_mask(policy: policies.Policy, flex: Any, q: Tensor) -> None:
    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    mask = flex_attention.create_block_mask(causal, 1, 1, 16, 16, device="cpu", BLOCK_SIZE=16)
    check(policy, lambda q: flex(q.sin(), q.cos(), q, block_mask=mask).sin(), q)


@dynamo_looks_at_grad
def test_flex_attention_without_a_gradient_of_its_own(
    policy: policies.Policy, flex: Any, q: Tensor
) -> None:
    def region(q: Tensor) -> Tensor:
        fixed = q.detach()
        return (q * flex(fixed.sin(), fixed.cos(), fixed)).sin()

    check(policy, region, q)


@dynamo_looks_at_grad
def test_cond(policy: policies.Policy, x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.sin().exp(), torch.cos, (x.exp(),)).sin()

    check(policy, region, x)


def test_a_higher_order_operator_that_changes_its_operand(
    policy: policies.Policy, x: Tensor
) -> None:
    def change(t: Tensor) -> tuple[Tensor]:
        return (t.mul_(3).clone(),)

    def region(x: Tensor) -> Tensor:
        buffer = x.detach() + 1
        before = buffer.sin()
        torch.ops.higher_order.cond(torch.tensor(True), change, change, (buffer,))
        return x * buffer + (x * before).exp()

    check(policy, region, x)


class _Plain(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
        wave = x.sin()
        ctx.save_for_backward(x, wave)
        ctx.power, ctx.made = power, wave.cos()
        return wave**power

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, wave = ctx.saved_tensors
        return grad * ctx.power * wave ** (ctx.power - 1) * x.cos() + 0 * ctx.made, None


class _Once(Function):
    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), (x > 0).long()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        out, signs = ctx.saved_tensors
        return grad * out + signs - signs


class _InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.exp_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class _GradInside(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = leaf.exp().sin()
            (ctx.grad,) = torch.autograd.grad(out.sum(), leaf)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.grad


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "intermediates": lambda x: _Plain.apply(x.exp(), 3).sin(),
    "outputs": lambda x: _Once.apply(x.tanh())[0].sin(),
    "mark_dirty": lambda x: _InPlace.apply(x.tanh() + 1).sin(),
    "grad_inside": lambda x: _GradInside.apply(x.tanh()).sin(),
}


@pytest.mark.parametrize("region", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_an_autograd_function(policy: policies.Policy, region: Any, x: Tensor) -> None:
    check(policy, region, x)


class _PastTheDispatcher(Function):
    """Writes as a kernel of Triton does that is given a pointer: no dispatcher sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clone()
        out.numpy()[:] *= 2
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_a_function_whose_kernel_changes_a_copy_past_the_dispatcher(
    policy: policies.Policy, x: Tensor
) -> None:
    check(policy, lambda x: _PastTheDispatcher.apply(x).sin(), x)


NEW = {
    "empty": lambda: torch.empty(6, 6),
    "empty_permuted": lambda: torch.empty_permuted((6, 6), (0, 1)),
    "zeros": lambda: torch.zeros(6, 6),
    "full": lambda: torch.full((6, 6), 1.0),
}


@pytest.mark.parametrize("new", NEW.values(), ids=NEW.keys())
def test_a_new_tensor_that_is_written_past_the_dispatcher(
    policy: policies.Policy, new: Callable[[], Tensor], x: Tensor
) -> None:
    def region(x: Tensor) -> Tensor:
        made = new()
        made.numpy()[:] = 3
        return x * made

    check(policy, region, x)


MASKS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.ones(16, 16).tril().bool()},
    "float": {"attn_mask": torch.linspace(-1, 1, 256).view(16, 16)},
}


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_attention(policy: policies.Policy, backend: Any, mask: Any, q: Tensor) -> None:
    def region(q: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            grouped = sdpa(q.sin(), q[:, :2].cos(), q[:, 2:], enable_gqa=True, **mask)
            return sdpa(q.sin(), q.cos(), grouped, **mask).sin()

    check(policy, region, q)


def test_attention_with_dropout_and_a_mask_that_wants_a_gradient(
    policy: policies.Policy, q: Tensor
) -> None:
    mask = torch.randn(16, 16, requires_grad=True)

    def region(q: Tensor, mask: Tensor) -> Tensor:
        return sdpa(q.sin(), q.cos(), q, attn_mask=mask.sin(), dropout_p=0.3).sin()

    check(policy, region, q, mask)
