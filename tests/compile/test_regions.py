"""Regions inside compiled functions: what runs in the forward graph, what again in the backward."""

import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import rekindle
import rekindle.compat.checkpoint
from rekindle import compat, policies
from rekindle.compile.graph_passes import are_installed
from tests.graphs import TORCHS_WARNINGS, WEIGHT, graphs_of, product
from tests.toys import Block, Stack, assert_same_step, leaf

pytestmark = TORCHS_WARNINGS


def wave(x: Tensor) -> Tensor:
    return x.sin().exp().tanh()


def scaled(x: Tensor, by: Tensor, power: int = 2) -> Tensor:
    return (x * by).sin().pow(power)


def test_without_a_region_nothing_that_is_saved_is_made_again() -> None:
    graphs = graphs_of(product, leaf(4, 8))
    assert graphs.times("mm") == (2, 4)  # the four of backward itself


def test_a_region_runs_once_in_forward_and_again_in_backward() -> None:
    graphs = graphs_of(lambda x: rekindle.checkpoint(product, x), leaf(4, 8))
    assert graphs.times("mm") == (2, 6)
    assert graphs.times("exp") == (1, 1)


def test_nothing_but_the_input_of_a_region_is_saved() -> None:
    graphs = graphs_of(lambda x: rekindle.checkpoint(product, x), leaf(4, 8))
    assert graphs.saved == ["input", "input"]  # x and the weight


def test_what_is_outside_of_a_region_is_not_made_again() -> None:
    graphs = graphs_of(lambda x: rekindle.checkpoint(wave, x @ WEIGHT), leaf(4, 8))
    assert graphs.times("mm") == (1, 2)
    assert graphs.times("sin") == (1, 1)
    assert "mm" in graphs.saved


def test_the_decorator_form_is_made_again_in_backward() -> None:
    region = rekindle.checkpoint(preserve_rng_state=False)(product)
    graphs = graphs_of(lambda x: region(x).sin(), leaf(4, 8))
    assert graphs.times("mm") == (2, 6)


def test_a_decorated_function_is_compiled_by_itself() -> None:
    region = rekindle.checkpoint()(product)
    assert graphs_of(region, leaf(4, 8)).times("mm") == (2, 6)


def test_tensors_among_the_keywords_of_a_region_are_saved() -> None:
    x, by = leaf(3), leaf(3)
    graphs = graphs_of(lambda x, by: rekindle.checkpoint(scaled, x, by=by, power=3), x, by)
    assert graphs.times("sin") == (1, 1)
    assert graphs.saved == ["input", "input"]
    assert by.grad is not None


def test_a_region_inside_a_region_is_made_again_once() -> None:
    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(wave, x.sigmoid()).cos()  # type: ignore[no-any-return]

    graphs = graphs_of(lambda x: rekindle.checkpoint(outer, x), leaf(3))
    assert (graphs.times("exp"), graphs.times("tanh")) == ((1, 1), (1, 1))


def test_each_segment_of_a_sequence_but_the_last_is_made_again() -> None:
    steps = [torch.sin, torch.exp, torch.sigmoid, torch.tanh]
    graphs = graphs_of(lambda x: rekindle.checkpoint_sequential(steps, 2, x), leaf(3))
    assert graphs.times("exp") == (1, 1)
    assert graphs.times("tanh") == (1, 0)


def test_a_region_of_many_outputs_compiles() -> None:
    def both(x: Tensor) -> dict[str, Any]:
        return {"a": x.sin().exp(), "b": (x.cos(), 3)}

    def run(x: Tensor) -> Tensor:
        out = rekindle.checkpoint(both, x)
        return out["a"] * out["b"][0] * out["b"][1]  # type: ignore[no-any-return]

    assert graphs_of(run, leaf(3)).times("exp") == (1, 1)


def test_options_that_a_graph_has_no_use_for_are_taken() -> None:
    def run(x: Tensor) -> Tensor:
        return rekindle.checkpoint(  # type: ignore[no-any-return]
            product, x, debug=True, determinism_check="values", early_stop=False
        )

    assert graphs_of(run, leaf(4, 8)).times("mm") == (2, 6)


def test_the_reentrant_variant_is_the_same_in_a_graph() -> None:
    graphs = graphs_of(lambda x: rekindle.checkpoint(product, x, use_reentrant=True), leaf(4, 8))
    assert graphs.times("mm") == (2, 6)


def test_torchs_name_under_the_patch_is_made_again_in_backward() -> None:
    def run(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(product, x, use_reentrant=False)  # type: ignore[no-any-return]

    with rekindle.patch_torch():
        assert graphs_of(run, leaf(4, 8)).times("mm") == (2, 6)


def test_our_graphs_are_those_of_torch() -> None:
    stack = Stack(2)

    def ours(x: Tensor) -> Tensor:
        return stack(x, rekindle.checkpoint)  # type: ignore[no-any-return]

    def torchs(x: Tensor) -> Tensor:
        return stack(  # type: ignore[no-any-return]
            x, lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        )

    x = leaf(4, 8)
    assert graphs_of(ours, x) == graphs_of(torchs, x)


def test_only_the_blocks_that_are_regions_are_made_again() -> None:
    blocks = [Block(), Block(), Block()]

    def run(x: Tensor) -> Tensor:
        for i, block in enumerate(blocks):
            x = block(x) if i == 1 else rekindle.checkpoint(block, x)
        return x

    graphs = graphs_of(run, leaf(4, 8))
    assert graphs.times("gelu") == (3, 2)
    assert graphs.times("native_layer_norm") == (3, 2)


@pytest.mark.parametrize("context_fn", [rekindle.noop_context_fn, policies.keep_matmuls])
def test_a_region_without_use_reentrant_is_part_of_a_full_graph_as_in_torch(
    context_fn: Any,
) -> None:
    """Where nobody warns: a warning would end the graph."""
    torchs = torch.utils.checkpoint.checkpoint
    if context_fn is not rekindle.noop_context_fn:  # torch cannot read a policy of ours
        torchs = functools.partial(torchs, context_fn=keeps_matmuls)
    theirs = graphs_of(lambda x: torchs(product, x), leaf(4, 8))
    ours = graphs_of(
        lambda x: compat.checkpoint.checkpoint(product, x, context_fn=context_fn), leaf(4, 8)
    )
    assert ours == theirs


keeps_matmuls = functools.partial(
    torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
)


def test_a_sequence_without_use_reentrant_is_part_of_a_full_graph() -> None:
    graphs = graphs_of(
        lambda x: compat.checkpoint.checkpoint_sequential([wave, wave], 2, x), leaf(4, 8)
    )
    assert graphs.times("exp") == (2, 1)


class Exported(nn.Module):
    """A region, or a region inside a region, with a policy or without."""

    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        self.block = Block()
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        return self.checkpoint(self.block, x.sin()).exp()  # type: ignore[no-any-return]


def nested(function: Any, x: Tensor) -> Tensor:
    return rekindle.checkpoint(lambda x: rekindle.checkpoint(function, x), x)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")  # of torch.export
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "checkpoint",
    [
        rekindle.checkpoint,
        functools.partial(rekindle.checkpoint, context_fn=policies.keep_matmuls),
        nested,
    ],
    ids=["plain", "policy", "nested"],
)
def test_a_region_is_exported(checkpoint: Any, strict: bool) -> None:
    model, x = Exported(checkpoint), leaf(4, 8)
    exported = torch.export.export(model, (x,), strict=strict).module()
    assert not are_installed(), "the passes of compilations are off again"
    assert torch.equal(exported(x), model(x))
    if strict:  # torch exports regions inside regions as without gradients if it is not
        assert_same_step(lambda: model(x), lambda: exported(x), [x])


@pytest.mark.filterwarnings("ignore")
def test_torch_exports_a_region_with_a_policy_and_we_do_with_none_too() -> None:
    torchs = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)

    def exported(checkpoint: Any) -> list[str]:
        program = torch.export.export(Exported(checkpoint), (leaf(4, 8),), strict=True)
        return [node.name for node in program.graph.nodes]

    ours = exported(rekindle.checkpoint)
    assert ours == exported(functools.partial(torchs, context_fn=keeps_matmuls))
    with pytest.raises(RuntimeError, match="_checkpoint_context_fn"):  # if not, see `_EXPORTED`
        exported(torchs)
