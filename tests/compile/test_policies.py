"""Policies in compiled code: what a policy keeps is saved in the graph and not made again."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import rekindle
from rekindle import CheckpointPolicy, policies
from rekindle.policies import at, every, first, keep, named, recompute
from tests.graphs import TORCHS_WARNINGS, WEIGHT, Graphs, graphs_of, product
from tests.toys import Block, Mlp, Stack, assert_same_step, leaf

pytestmark = TORCHS_WARNINGS


def under(context_fn: Any, function: Callable[..., Any] = product) -> Graphs:
    """The graphs of a function of one tensor under a policy."""
    return graphs_of(lambda x: rekindle.checkpoint(function, x, context_fn=context_fn), leaf(4, 8))


def test_what_a_policy_keeps_is_saved_and_not_made_again() -> None:
    graphs = under(keep("aten::mm"))
    assert graphs.times("mm") == (2, 4)
    assert graphs.saved.count("mm") == 2


def test_what_a_policy_does_not_speak_of_is_made_again() -> None:
    graphs = under(keep("aten::mm"))
    assert (graphs.times("sin"), graphs.times("exp")) == ((1, 1), (1, 1))


def test_a_list_of_ops_is_kept() -> None:
    ops = [torch.ops.aten.mm]
    contexts = functools.partial(rekindle.create_selective_checkpoint_contexts, ops)
    assert under(contexts).times("mm") == (2, 4)


def test_torchs_own_contexts_are_taken() -> None:
    ops = [torch.ops.aten.mm.default]
    make = torch.utils.checkpoint.create_selective_checkpoint_contexts
    assert under(functools.partial(make, ops)).times("mm") == (2, 4)


def test_torchs_contexts_under_the_patch_are_taken() -> None:
    with rekindle.patch_torch():
        make = torch.utils.checkpoint.create_selective_checkpoint_contexts
        assert under(functools.partial(make, [torch.ops.aten.mm.default])).times("mm") == (2, 4)


def by_function(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_first = op == torch.ops.aten.mm.default and ctx.index == 0
    return CheckpointPolicy.MUST_SAVE if is_first else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_function_is_told_how_often_an_op_ran() -> None:
    contexts = functools.partial(rekindle.create_selective_checkpoint_contexts, by_function)
    assert under(contexts).times("mm") == (2, 5)


def test_a_function_that_returns_words_is_a_policy() -> None:
    def by_word(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> str:
        return "keep" if op == torch.ops.aten.mm.default else "recompute"

    contexts = functools.partial(rekindle.create_selective_checkpoint_contexts, by_word)
    assert under(contexts).times("mm") == (2, 4)


def chain(x: Tensor) -> Tensor:
    return x.sin().cos().exp().sin().tanh()


def answers(answer: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    return lambda ctx, op, *args, **kwargs: answer


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        (CheckpointPolicy.MUST_SAVE, 3),
        (CheckpointPolicy.PREFER_SAVE, 2),
        (CheckpointPolicy.PREFER_RECOMPUTE, 0),
        (CheckpointPolicy.MUST_RECOMPUTE, 0),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_what_a_policy_prefers_to_keep_is_left_to_the_compiler_as_in_torch(
    answer: CheckpointPolicy, count: int
) -> None:
    policy, torchs = answers(answer), torch.utils.checkpoint
    contexts = functools.partial(torchs.create_selective_checkpoint_contexts, policy)
    theirs = graphs_of(
        lambda x: torchs.checkpoint(chain, x, use_reentrant=False, context_fn=contexts), leaf(4, 8)
    )
    ours = under(policies.of(policy), chain)
    assert ours.saved == theirs.saved
    assert len(ours.saved) == 1 + count  # beside the input


def test_a_preference_outlasts_the_policies_around_it() -> None:
    prefer = policies.of(answers(CheckpointPolicy.PREFER_SAVE))
    joined = recompute("aten::mm") | first(9, every(1, prefer))
    assert under(joined, chain).saved == ["input", "exp", "tanh"]


def test_what_a_policy_prefers_to_keep_is_kept_without_a_compiler() -> None:
    prefer = policies.of(answers(CheckpointPolicy.PREFER_SAVE))
    with rekindle.observe() as seen:
        rekindle.checkpoint(chain, leaf(4, 8), context_fn=prefer).sum().backward()
    assert seen.total.ops_replayed == 0


def test_every_second_product_is_kept() -> None:
    assert under(every(2, keep("aten::mm"))).times("mm") == (2, 5)


def test_the_first_product_is_kept() -> None:
    assert under(first(1, keep("aten::mm"))).times("mm") == (2, 5)


def test_each_call_of_a_region_counts_anew() -> None:
    policy = first(1, keep("aten::mm"))

    def run(x: Tensor) -> Tensor:
        once = rekindle.checkpoint(product, x, context_fn=policy)
        return rekindle.checkpoint(product, once, context_fn=policy)  # type: ignore[no-any-return]

    assert graphs_of(run, leaf(4, 8)).times("mm") == (4, 10)


def test_the_first_policy_to_speak_decides() -> None:
    assert under(recompute("aten::mm") | keep("aten::mm", "aten::sin")).times("mm") == (2, 6)


@pytest.mark.parametrize("pattern", ["mlp.up", "up", "mlp.u*"])
def test_a_policy_for_a_module_speaks_of_its_ops_only(pattern: str) -> None:
    block = Block()
    graphs = under(at(pattern, "keep"), block)
    assert graphs.times("addmm") == (2, 0)
    assert graphs.saved.count("addmm") == 1
    assert graphs.times("native_layer_norm") == (1, 1)


def test_a_policy_for_a_module_that_is_not_there_keeps_nothing() -> None:
    assert "addmm" not in under(at("attention", "keep"), Block()).saved


class Blocks(nn.Module):
    """Blocks, each a region under one policy."""

    def __init__(self, policy: policies.Policy) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.policy = policy

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = rekindle.checkpoint(block, x, context_fn=self.policy)
        return x


def test_paths_begin_at_the_outermost_module_of_the_graph() -> None:
    graphs = graphs_of(Blocks(at("blocks.1.mlp.up", "keep")), leaf(4, 8))
    assert graphs.saved.count("addmm") == 1


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "Module.compile"])
def test_paths_of_a_block_that_is_compiled_alone_begin_at_the_model(in_place: bool) -> None:
    """Every block has the same code; the graph of the second is not that of the first."""
    stack, graphs = Stack(2), Graphs()
    rekindle.apply(stack, {"blocks.*": "recompute", "blocks.1.mlp.up": "keep"})
    for i, block in enumerate(stack.blocks):
        if in_place:
            block.compile(backend=graphs.backend(), fullgraph=True)
        else:
            stack.blocks[i] = torch.compile(block, backend=graphs.backend(), fullgraph=True)  # type: ignore[assignment]
    stack(leaf(4, 8)).sum().backward()
    assert graphs.saved.count("addmm") == 1


def test_a_tensor_that_was_named_is_kept() -> None:
    def region(x: Tensor) -> Tensor:
        return rekindle.name(x.sin(), "wave").exp().tanh()

    graphs = under(named("wave"), region)
    assert graphs.times("sin") == (1, 0)
    assert graphs.saved == ["input", "sin"]


def test_a_named_tensor_of_another_name_is_made_again() -> None:
    def region(x: Tensor) -> Tensor:
        return rekindle.name(x.sin(), "ripple").exp().tanh()

    assert under(named("wave"), region).times("sin") == (1, 1)


def test_a_function_that_was_named_is_kept() -> None:
    wave = rekindle.name(lambda x: x.sin().exp(), "wave")
    graphs = under(named("wave"), lambda x: wave(x).cos().tanh())
    assert graphs.times("exp") == (1, 0)
    assert graphs.times("tanh") == (1, 1)


def test_a_name_outside_of_a_policy_changes_nothing() -> None:
    x = leaf(3)
    run = torch.compile(lambda x: rekindle.name(x.sin(), "wave").exp(), backend="aot_eager")
    assert_same_step(lambda: x.sin().exp(), lambda: run(x), [x])


class Wave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.sin().exp()
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, out = ctx.saved_tensors
        return grad * out * x.cos()


def waves(x: Tensor) -> Tensor:
    return Wave.apply(x.sigmoid()).tanh()  # type: ignore[no-any-return, no-untyped-call]


def test_an_autograd_function_is_made_again_in_backward() -> None:
    graphs = graphs_of(lambda x: rekindle.checkpoint(waves, x), leaf(4, 8))
    assert graphs.times("exp") == (1, 1)


def test_an_autograd_function_is_kept_as_a_unit() -> None:
    graphs = under(keep(Wave), waves)
    assert graphs.times("exp") == (1, 0)
    assert graphs.times("tanh") == (1, 1)


def test_ready_made_policies_keep_matrix_products() -> None:
    graphs = under(policies.keep_matmuls, Mlp())
    assert graphs.times("addmm") == (2, 0)
    assert graphs.times("gelu") == (1, 1)


def test_attention_is_kept() -> None:
    def attend(x: Tensor) -> Tensor:
        q = x.view(1, 1, 4, 8)
        out = nn.functional.scaled_dot_product_attention(q.sin(), q.cos(), q)
        return out.exp()

    op = "_scaled_dot_product_flash_attention_for_cpu"
    assert under(recompute(), attend).times(op) == (1, 1)
    assert under(policies.keep_attention, attend).times(op) == (1, 0)


def test_a_policy_that_is_made_in_compiled_code_is_a_clear_error_in_a_full_graph() -> None:
    def run(x: Tensor) -> Tensor:
        return rekindle.checkpoint(product, x, context_fn=keep("aten::mm"))  # type: ignore[no-any-return]

    with pytest.raises(Exception, match="policy is made in compiled code: make the policy before"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(leaf(4, 8))


def test_a_policy_that_is_made_in_compiled_code_breaks_the_graph_there() -> None:
    x = leaf(4, 8)

    @torch.compile(backend="aot_eager")
    def run(x: Tensor) -> Tensor:
        return rekindle.checkpoint(product, x, context_fn=keep("aten::mm"))  # type: ignore[no-any-return]

    assert_same_step(lambda: product(x), lambda: run(x), [x, WEIGHT])


def test_paths_and_names_are_told_on_the_eager_backend_too() -> None:
    seen: set[tuple[str, tuple[str, ...]]] = set()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> str:
        if op == torch.ops.aten.addmm.default:
            seen.add((ctx.module_path, ctx.names))
        return "recompute"

    contexts = functools.partial(rekindle.create_selective_checkpoint_contexts, policy)
    block = Block()
    run = rekindle.name(lambda x: block(x).sin(), "wave")
    compiled = torch.compile(
        lambda x: rekindle.checkpoint(run, x, context_fn=contexts), backend="eager"
    )
    compiled(leaf(4, 8)).sum().backward()
    assert seen == {("mlp.up", ("wave",)), ("mlp.down", ("wave",))}
