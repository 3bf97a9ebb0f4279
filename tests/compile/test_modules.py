"""Wrappers and `rekindle.apply` in compiled models, and compiled modules inside of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import rekindle
from rekindle import policies
from rekindle.policies import keep
from tests.graphs import TORCHS_WARNINGS, graphs_of
from tests.toys import Block, Stack, assert_same_step, leaf

pytestmark = TORCHS_WARNINGS


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend="aot_eager", **options)


def test_a_wrapped_module_is_made_again_in_backward() -> None:
    graphs = graphs_of(rekindle.checkpoint_wrapper(Block()), leaf(4, 8))
    assert graphs.times("gelu") == (1, 1)
    assert set(graphs.saved) == {"input"}


def test_a_wrapped_module_has_a_policy() -> None:
    wrapped = rekindle.checkpoint_wrapper(Block(), context_fn=policies.keep_matmuls)
    graphs = graphs_of(wrapped, leaf(4, 8))
    assert graphs.times("addmm") == (2, 0)
    assert graphs.times("gelu") == (1, 1)


def test_a_model_of_wrapped_blocks_compiles_as_one_graph() -> None:
    stack = Stack(3)
    for i, block in enumerate(stack.blocks):
        stack.blocks[i] = rekindle.checkpoint_wrapper(block)
    graphs = graphs_of(stack, leaf(4, 8))
    assert (graphs.count, graphs.times("gelu")) == (1, (3, 3))


def test_a_wrapper_of_torchs_under_the_patch_is_made_again_in_backward() -> None:
    with rekindle.patch_torch():
        wrapped = torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper(
            Block()
        )
        assert graphs_of(wrapped, leaf(4, 8)).times("gelu") == (1, 1)


class Keyworded(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor, debug: bool = False) -> Tensor:
        return (x * scale).sin().exp().tanh()


def test_a_wrapped_module_takes_keywords() -> None:
    x, scale = leaf(3), leaf(3)
    wrapped = rekindle.checkpoint_wrapper(Keyworded(), debug=False)
    graphs = graphs_of(lambda x: wrapped(x, scale=scale), x)
    assert (graphs.count, graphs.times("sin")) == (1, (1, 1))


def test_an_applied_module_takes_keywords_that_are_named_as_options() -> None:
    module, x, scale = Keyworded(), leaf(3), leaf(3)
    rekindle.apply(module, {"": "recompute"})
    graphs = graphs_of(lambda x: module(x, scale=scale, debug=True), x)
    assert graphs.times("sin") == (1, 1)


def test_blocks_that_are_recomputed_are_made_again_in_backward() -> None:
    stack = Stack(3)
    rekindle.apply(stack, "recompute")
    graphs = graphs_of(stack, leaf(4, 8))
    assert (graphs.count, graphs.times("gelu")) == (1, (3, 3))


def test_blocks_that_are_kept_are_not_made_again() -> None:
    stack = Stack(3)
    rekindle.apply(stack, {"blocks.0": "recompute", "blocks.1": "keep"})
    assert graphs_of(stack, leaf(4, 8)).times("gelu") == (3, 1)


def test_blocks_under_a_policy_keep_what_it_says() -> None:
    stack = Stack(2)
    rekindle.apply(stack, keep("aten::addmm"))
    graphs = graphs_of(stack, leaf(4, 8))
    assert graphs.times("addmm") == (4, 0)
    assert graphs.times("native_layer_norm") == (2, 2)


def test_a_part_of_a_block_that_is_recomputed_is_kept() -> None:
    stack = Stack(2)
    rekindle.apply(stack, {"blocks.*": "recompute", "blocks.*.mlp.up": "keep"})
    graphs = graphs_of(stack, leaf(4, 8))
    assert graphs.saved.count("addmm") == 2
    assert graphs.times("gelu") == (2, 2)


def test_what_was_removed_is_compiled_anew_without_regions() -> None:
    stack, x = Stack(2), leaf(4, 8)
    rekindle.apply(stack, "recompute")
    assert graphs_of(stack, x).times("gelu") == (2, 2)
    rekindle.remove(stack)
    assert graphs_of(stack, x).times("gelu") == (2, 0)


@pytest.mark.parametrize("what", ["recompute", policies.keep_matmuls], ids=["recompute", "policy"])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_a_compiled_model_has_the_same_gradients_with_strategies_and_without(
    what: Any, drop: float
) -> None:
    stack, x = Stack(2, drop=drop), leaf(4, 8)
    plain = compiled(stack, fullgraph=True)
    leaves = [x, *stack.parameters()]

    def with_strategies(x: Tensor) -> Any:
        rekindle.apply(stack, what)
        try:
            return compiled(stack, fullgraph=True)(x)
        finally:
            rekindle.remove(stack)

    assert_same_step(lambda: plain(x), lambda: with_strategies(x), leaves)


def test_strategies_around_blocks_that_are_compiled_alone_are_regions_in_their_graphs() -> None:
    stack, x = Stack(3, drop=0.5), leaf(4, 8)
    for block in stack.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    plain = Stack(3, drop=0.5)
    plain.load_state_dict(stack.state_dict())
    for block in plain.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    rekindle.apply(stack, "recompute")

    torch.manual_seed(1)
    plain(x).sum().backward()
    expected, x.grad = x.grad, None
    torch.manual_seed(1)
    stack(x).sum().backward()
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


def test_blocks_of_one_class_share_a_graph() -> None:
    stack, counter = Stack(4), CompileCounterWithBackend("aot_eager")
    rekindle.apply(stack, "recompute")
    for block in stack.blocks:
        block.compile(backend=counter, fullgraph=True)
    for _ in range(3):
        stack(leaf(4, 8)).sum().backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize("what", ["recompute", policies.keep_matmuls], ids=["recompute", "policy"])
def test_steps_do_not_compile_anew(what: Any) -> None:
    stack, counter = Stack(2), CompileCounterWithBackend("aot_eager")
    rekindle.apply(stack, what)
    run = torch.compile(stack, backend=counter, fullgraph=True)
    for _ in range(6):
        run(leaf(4, 8)).sum().backward()
    assert counter.frame_count == 1


def test_an_eager_region_around_compiled_blocks_is_replayed_by_us() -> None:
    stack, x = Stack(2, drop=0.5), leaf(4, 8)
    blocks = [compiled(block, fullgraph=True) for block in stack.blocks]

    def plain() -> Any:
        return blocks[1](blocks[0](x))

    def regions() -> Any:
        return rekindle.checkpoint(blocks[1], rekindle.checkpoint(blocks[0], x))

    assert_same_step(plain, regions, [x, *stack.parameters()])
    with rekindle.observe() as seen:
        regions().sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (2, 2)


def test_a_policy_around_a_compiled_block_is_right() -> None:
    block, x = Block(drop=0.5), leaf(4, 8)
    inner = compiled(block, fullgraph=True)
    policy = policies.keep_matmuls
    assert_same_step(
        lambda: inner(x),
        lambda: rekindle.checkpoint(inner, x, context_fn=policy),
        [x, *block.parameters()],
    )


def test_a_wrapper_around_a_compiled_block_is_right() -> None:
    block, x = Block(drop=0.5), leaf(4, 8)
    inner = compiled(block, fullgraph=True)
    wrapped = rekindle.checkpoint_wrapper(inner)
    assert_same_step(lambda: inner(x), lambda: wrapped(x), [x, *block.parameters()])
