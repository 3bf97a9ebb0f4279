"""Models with strategies under `torch.compile`."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import policies
from tests.modules.applying import NESTED, applied, managed, replays_in
from tests.toys import Block, Stack, gradients, leaf


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: nn.Module, backend: str) -> Callable[..., Any]:
    """Compiled as one graph, or an error."""
    return torch.compile(model, backend=backend, fullgraph=True)


def assert_close(model: nn.Module, run: Callable[..., Any], x: Tensor) -> None:
    leaves = [x, *model.parameters()]
    out, found, _ = gradients(lambda: run(x), leaves)
    rekindle.remove(model)
    torch.compiler.reset()
    plain_out, plain, _ = gradients(lambda: model(x), leaves)
    torch.testing.assert_close(out, plain_out)
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("what", ["recompute", policies.keep_matmuls, NESTED])
@pytest.mark.usefixtures("fresh_compiler")
def test_a_model_compiled_after_apply_is_one_graph_with_the_plain_gradients(what: Any) -> None:
    model = applied(what)
    assert_close(model, compiled(model, "eager"), leaf())


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_backward_has_the_plain_gradients() -> None:
    model = applied()
    assert_close(model, compiled(model, "aot_eager"), leaf())


@pytest.mark.usefixtures("fresh_compiler")
def test_a_recomputed_block_is_a_region_of_the_compiled_graph() -> None:
    model, graphs = applied(), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compile(model, backend=backend)(leaf())
    code = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum("tag_activation_checkpoint" in target for target in code) == 2


@pytest.mark.parametrize("what", ["recompute", NESTED], ids=["plain", "nested"])
@pytest.mark.usefixtures("fresh_compiler")
def test_a_model_compiled_and_run_before_apply_has_the_plain_gradients_after(what: Any) -> None:
    model, x = Stack(2), leaf()
    run = compiled(model, "eager")
    run(x).sum().backward()
    rekindle.apply(model, what)
    assert_close(model, run, x)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_model_compiled_and_run_before_apply_is_compiled_again_with_the_strategies() -> None:
    model, graphs = Stack(2), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    run = torch.compile(model, backend=backend)
    run(leaf())
    rekindle.apply(model, "recompute")
    run(leaf())
    rekindle.remove(model)
    run(leaf())
    targets = [[str(node.target) for node in graph.graph.nodes] for graph in graphs]
    found = [sum("tag_activation_checkpoint" in name for name in names) for names in targets]
    assert found in ([0, 2], [0, 2, 0])


@pytest.mark.usefixtures("fresh_compiler")
def test_strategies_can_be_applied_to_a_compiled_model() -> None:
    model, x = Stack(2), leaf()
    run = compiled(model, "eager")
    rekindle.apply(run, "recompute")  # type: ignore[arg-type]
    assert managed(model) == ["blocks.0", "blocks.1"]
    assert_close(model, run, x)


@pytest.mark.usefixtures("fresh_compiler")
def test_blocks_compiled_in_place_are_recomputed() -> None:
    model, x = Stack(2), leaf()
    for block in model.blocks:
        block.compile(backend="eager")
    rekindle.apply(model, "recompute")
    assert_close(model, model, x)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks_are_recomputed_as_a_whole() -> None:
    blocks: list[Any] = [torch.compile(Block(), backend="eager") for _ in range(2)]
    model, x = nn.Sequential(*blocks), leaf()
    rekindle.apply(model, "recompute")
    assert replays_in(lambda: model(x).sum().backward()) == 2
    assert_close(model, model, x)


def test_an_applied_model_is_exported() -> None:
    model, x = applied().eval(), leaf()
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))
