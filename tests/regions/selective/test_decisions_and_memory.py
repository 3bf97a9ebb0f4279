"""Every decision where memory is exchanged, drawn, written unseen or changed in place."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import rekindle
from rekindle.policies import Policy, first, keep, recompute, recompute_cheap, spill
from tests.regions.selective.toy_regions import assert_plain, eight_waves
from tests.toys import leaf, same_bits

aten = torch.ops.aten


@pytest.mark.parametrize("policy", [keep(), recompute(), spill(), recompute_cheap], ids=repr)
def test_a_parameters_memory_may_be_exchanged_between_forward_and_backward(policy: Policy) -> None:
    """Sharded training gathers parameters for forward, frees them, and gathers them again."""
    linear, x = nn.Linear(8, 8), leaf(4, 8)
    expected = torch.autograd.grad(linear(x.sin()).sum(), x)[0]
    out = rekindle.checkpoint(lambda x: linear(x.sin()), x, context_fn=policy)
    before = StorageWeakRef(linear.weight.untyped_storage())
    linear.weight.data = linear.weight.data.clone()
    assert before.expired()
    assert same_bits(torch.autograd.grad(out.sum(), x)[0], expected)


@pytest.mark.parametrize("drop", [functional.dropout, functional.alpha_dropout])
def test_dropout_has_the_plain_mask_whatever_is_decided(drop: Any, decision: Policy) -> None:
    x = leaf(64)
    assert_plain(lambda x: drop(drop(x.sin(), 0.5).exp(), 0.3).sin(), decision, x)


def test_a_fused_dropout_is_run_again_with_its_mask(ran: Counter[Any]) -> None:
    def region(x: Tensor) -> Tensor:
        return torch.native_dropout(x.sin(), 0.5, True)[0].exp()

    x = leaf(64)
    assert_plain(region, recompute(), x)
    assert ran[aten.native_dropout.default] == 1
    ran.clear()
    assert_plain(region, keep("aten::native_dropout"), x)
    assert ran == {aten.exp.default: 1}


def test_a_step_draws_as_many_numbers_as_the_plain_one_though_some_are_drawn_again() -> None:
    x = leaf(64)

    def region(x: Tensor) -> Tensor:
        return (x * torch.rand(64)).sin() * torch.rand_like(x) + torch.randperm(64)

    assert_plain(region, recompute(), x)
    assert_plain(region, first(1, keep()), x)


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.sin().t(),
        lambda x: x.sin()[:, ::2],
        lambda x: x.sin().expand(2, 8, 8),
        lambda x: x.sin().to(torch.bfloat16),
        lambda x: torch.complex(x.sin(), x),
        lambda x: x.sin()[:0],
        lambda x: x.sin().sum(),
        lambda x: x.sin().to(memory_format=torch.preserve_format)[None].permute(2, 0, 1),
    ],
    ids=["transposed", "strided", "expanded", "bfloat16", "complex", "empty", "scalar", "permuted"],
)
def test_tensors_of_every_kind_come_back_from_disk(make: Callable[[Tensor], Tensor]) -> None:
    def region(x: Tensor) -> Tensor:
        y = make(x)
        return (y.sin() * y.exp()).abs().float().sum() * eight_waves(x).sum()

    assert_plain(region, spill(), leaf(8, 8))


def test_a_recurrent_layer_has_the_plain_gradients(decision: Policy) -> None:
    """Its kernel leaves out what backward needs if gradients are off."""
    lstm, x = nn.LSTM(4, 4), leaf(3, 2, 4)
    assert_plain(lambda x: lstm(x.sin())[0].sin(), decision, x, *lstm.parameters())


def test_memory_that_is_written_past_the_dispatcher_is_not_made_again(decision: Policy) -> None:
    """As NumPy does, and every kernel of Triton: also into memory that begins as zeros."""

    def region(x: Tensor) -> Tensor:
        mask = torch.zeros(4)
        mask.numpy()[1:3] = 2
        return (x * mask).sin()

    assert_plain(region, decision, leaf(4))


def test_a_copy_that_is_written_past_the_dispatcher_is_not_made_again(decision: Policy) -> None:
    def region(x: Tensor) -> Tensor:
        mask = x.detach().clone()
        mask.numpy()[1:3] = 2
        return (x * mask).sin()

    assert_plain(region, decision, leaf(4))


def test_a_tensor_whose_data_is_exchanged_in_the_region_has_the_plain_gradients(
    decision: Policy,
) -> None:
    def region(x: Tensor) -> Tensor:
        y = x.sin()
        y.data = y.data * 2
        return y.exp()

    assert_plain(region, decision, leaf(4))


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(4) / 3, lambda: torch.arange(4) / 3], ids=["factory", "division"]
)
def test_another_default_dtype_in_forward_holds_for_what_is_run_again(
    make: Callable[[], Tensor], decision: Policy
) -> None:
    def region(x: Tensor) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return (x * make()).exp()
        finally:
            torch.set_default_dtype(before)

    assert_plain(region, decision, torch.randn(4, dtype=torch.float64, requires_grad=True))


def test_parts_of_a_result_may_be_changed_that_do_not_say_they_are_views(decision: Policy) -> None:
    def region(x: Tensor) -> Tensor:
        y = x.sin()
        z = (y + 1).exp()
        left, right = torch.unsafe_chunk(y, 2)
        del y
        return z + torch.cat([left.mul_(2), right])

    assert_plain(region, decision, leaf(4))


def test_a_parameter_that_the_region_changes_after_use_was_used_as_it_was(decision: Policy) -> None:
    weight, x = nn.Parameter(torch.ones(4)), leaf(4)

    def region(x: Tensor) -> Tensor:
        y = (x + weight).exp()
        with torch.no_grad():
            weight.mul_(1)
        return y

    assert_plain(region, decision, x, weight)


def test_buffers_end_as_without_a_region(decision: Policy) -> None:
    norm = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4))
    twin, x = copy.deepcopy(norm), leaf(8, 4)
    rekindle.checkpoint(norm, x, context_fn=decision).sin().sum().backward()
    twin(x).sin().sum().backward()
    for a, b in zip(norm.state_dict().values(), twin.state_dict().values(), strict=True):
        assert same_bits(a, b)


def test_a_backward_that_failed_can_be_run_again(decision: Policy) -> None:
    x, fails = leaf(4), [True]

    def hook(grad: Tensor) -> None:
        if fails.pop():
            raise ZeroDivisionError

    def region(x: Tensor) -> Tensor:
        y = x.sin().exp()
        y.register_hook(hook)
        return y.tanh().exp()

    loss = rekindle.checkpoint(region, x, context_fn=decision).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    fails[:] = [False] * 2
    loss.backward()
    assert same_bits(x.grad, torch.autograd.grad(region(x).sum(), x)[0])
