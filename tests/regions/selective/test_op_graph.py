"""A region that is recorded op by op: what backward needs is made again from what is held."""

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import rekindle
from benchmarks.decoder import SHAPES, Block
from rekindle import policies
from rekindle.regions.selective.op_kinds import OpTraits
from rekindle.regions.selective.selective_region import run
from tests.toys import Stack, assert_same_step, same_bits

aten = torch.ops.aten
MATMULS = {
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


nothing = policies.recompute()
everything = policies.keep()
matmuls = policies.keep(MATMULS)


POLICIES = [nothing, everything, matmuls]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decoder_block_has_plain_gradients(policy: policies.Policy) -> None:
    block = Block(SHAPES["tiny"], dtype=torch.float32)
    x = torch.randn(1, 8, 32, requires_grad=True)
    leaves = [x, *block.parameters()]
    assert_same_step(lambda: block(x), lambda: run(policy, block, x), leaves)


@pytest.mark.parametrize("policy", POLICIES)
def test_dropout_has_the_same_mask(policy: policies.Policy) -> None:
    stack, x = Stack(drop=0.3), torch.randn(5, 8, requires_grad=True)
    leaves = [x, *stack.parameters()]
    assert_same_step(
        lambda: stack(x), lambda: stack(x, lambda block, x: run(policy, block, x)), leaves
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_an_op_that_draws_is_made_again_with_the_same_numbers(policy: policies.Policy) -> None:
    x = torch.randn(64, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        return (x * torch.rand_like(x)).sin() * torch.bernoulli(torch.full_like(x, 0.5))

    assert_same_step(lambda: region(x), lambda: run(policy, region, x), [x])


@pytest.mark.parametrize("policy", POLICIES)
def test_in_place_ops_and_views_have_plain_gradients(policy: policies.Policy) -> None:
    x = torch.randn(6, 4, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        y = x.sin()
        y[1:3].mul_(2)
        z = y.view(4, 6).t() + 1
        z.add_(1).tanh_()
        left, right = z.chunk(2)
        return left * right.cos()

    assert_same_step(lambda: region(x), lambda: run(policy, region, x), [x])


def test_a_kept_result_that_is_changed_later_is_kept_as_it_was() -> None:
    x = torch.randn(8, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        y = x + 1
        z = y.sin()
        y.zero_()
        return z

    (expected,) = torch.autograd.grad((x + 1).sin().sum(), x)
    assert same_bits(torch.autograd.grad(run(everything, region, x).sum(), x)[0], expected)


def test_batch_norm_changes_its_statistics_once() -> None:
    torch.manual_seed(0)
    norm, twin = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    x = torch.randn(8, 4, requires_grad=True)
    run(nothing, lambda x: norm(x.sin()).cos(), x).sum().backward()
    twin(x.sin()).cos().sum().backward()
    assert same_bits(norm.running_mean, twin.running_mean)
    assert same_bits(norm.weight.grad, twin.weight.grad)


def test_only_what_is_needed_is_made_again(ran: Counter[Any]) -> None:
    x = torch.randn(8, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        needed = x.sin().exp()  # of which autograd saves x and the result
        for_nothing = x.tanh().detach().log()
        return needed + for_nothing

    run(nothing, region, x).sum().backward()
    assert ran == {aten.sin.default: 1, aten.exp.default: 1}


def test_a_region_that_keeps_matmuls_runs_none_of_them_again(ran: Counter[Any]) -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8, requires_grad=True)
    run(matmuls, lambda x: functional.silu(x @ weight) @ weight, x).sum().backward()
    assert ran == {aten.silu.default: 1}


def test_a_decoder_block_that_keeps_matmuls_makes_the_cheap_ops_again_once_each(
    ran: Counter[Any],
) -> None:
    block = Block(SHAPES["tiny"], dtype=torch.float32)
    x = torch.randn(1, 8, 32, requires_grad=True)
    run(matmuls, block, x).sum().backward()
    assert not MATMULS & ran.keys()
    assert ran[aten.silu.default] == 1
    assert ran[aten.rsqrt.default] == 2
    assert ran[aten.add.Tensor] == 5  # the last residual is not needed


def test_what_nobody_needs_is_not_held_though_it_is_to_be_kept() -> None:
    x = torch.randn(8, requires_grad=True)
    made: list[Any] = []

    def region(x: Tensor) -> Tensor:
        useless = x + 1  # autograd saves nothing of an addition
        made.append(ref(useless.untyped_storage()))
        return useless + 1

    gc.disable()
    try:
        out = run(everything, region, x)
        assert made[0]() is None
        del out
    finally:
        gc.enable()


def test_all_that_is_held_dies_with_the_graph_without_the_collector() -> None:
    x = torch.randn(8, requires_grad=True)
    kept: list[Any] = []

    def keep(ctx: Any, op: Any, *args: Any) -> bool:
        kept.append(StorageWeakRef(ctx.op_output.untyped_storage()))
        return True

    gc.disable()
    try:
        out = run(policies.of(keep), lambda x: x.exp().sin().cos(), x).sum()
        del out
        assert all(weak.expired() for weak in kept)
    finally:
        gc.enable()


def test_a_graph_may_be_gone_through_twice_and_differentiated_twice() -> None:
    x = torch.randn(8, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        return x.sin().exp().tanh()

    (first,) = torch.autograd.grad(region(x).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(first.sum(), x)
    loss = run(nothing, region, x).sum()
    assert same_bits(torch.autograd.grad(loss, x, retain_graph=True)[0], first)
    (again,) = torch.autograd.grad(loss, x, create_graph=True)
    assert same_bits(again, first)
    assert same_bits(torch.autograd.grad(again.sum(), x)[0], expected)


def test_regions_nest_with_policies_of_their_own() -> None:
    x = torch.randn(8, requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        return x.sin().exp()

    def outer(x: Tensor) -> Tensor:
        return run(everything, inner, x.tanh()).cos().exp()

    def checkpointed(x: Tensor) -> Tensor:
        return rekindle.checkpoint(inner, x.tanh()).cos().exp()

    assert_same_step(lambda: inner(x.tanh()).cos().exp(), lambda: run(nothing, outer, x), [x])
    assert_same_step(lambda: checkpointed(x), lambda: run(nothing, checkpointed, x), [x])
    assert_same_step(lambda: outer(x), lambda: rekindle.checkpoint(outer, x), [x])


def test_autocast_casts_once() -> None:
    linear, x = torch.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear(x.sin()).float().exp()

    def step(run_it: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return run_it

    leaves = [x, *linear.parameters()]
    assert_same_step(step(lambda: region(x)), step(lambda: run(nothing, region, x)), leaves)


def test_what_is_held_passes_through_hooks_around_the_region() -> None:
    x = torch.randn(8, requires_grad=True)
    seen: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.detach()

    (expected,) = torch.autograd.grad((x + 1).exp().sin().sum(), x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(everything, lambda x: (x + 1).exp().sin(), x)
    assert len(seen) > 0
    assert same_bits(torch.autograd.grad(out.sum(), x)[0], expected)


@pytest.mark.parametrize(
    ("op", "count"),
    [
        (aten.mul.Tensor, 2),
        (aten.addmm.default, 3),
        (aten.view.default, 1),
        (aten.cat.default, 0),  # a list of tensors
        (aten.native_layer_norm.default, 0),  # tensors after a shape
        (aten.clamp.Tensor, 0),  # tensors that may be None
        (aten.arange.default, 0),
    ],
)
def test_an_op_whose_tensors_all_come_first_is_known_by_their_number(op: Any, count: int) -> None:
    assert OpTraits(op).leading == count


@pytest.mark.parametrize("policy", POLICIES)
def test_a_number_may_take_the_place_of_any_tensor(policy: policies.Policy) -> None:
    x = torch.randn(8, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        first, second = aten.mul.Tensor(3, x.sin()), aten.mul.Tensor(x.cos(), 2)
        return (first.exp() * second.exp()).clamp(torch.zeros(8)).exp()

    assert_same_step(lambda: region(x), lambda: run(policy, region, x), [x])
