"""A graph break inside a region: still right, still a region of ours, and said once."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle import policies
from rekindle.compiled import breaks
from tests.graphs import TORCHS_WARNINGS, fresh_compiler
from tests.toys import Block, assert_same_step, leaf

pytestmark = TORCHS_WARNINGS


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    breaks._told.clear()
    with fresh_compiler():
        yield


BLOCK = Block(drop=0.5)


def broken(x: Tensor) -> Tensor:
    y = BLOCK(x)
    torch._dynamo.graph_break()
    return y.sin().exp()  # type: ignore[no-any-return]


def run(x: Tensor) -> Tensor:
    return rekindle.checkpoint(broken, x.cos()) * 2  # type: ignore[no-any-return]


def run_with_a_policy(x: Tensor) -> Tensor:
    return rekindle.checkpoint(broken, x.cos(), context_fn=policies.keep_matmuls) * 2  # type: ignore[no-any-return]


quiet = pytest.mark.filterwarnings("ignore:The region broken is called in compiled code")


@quiet
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("step", [run, run_with_a_policy])
def test_a_region_in_which_the_graph_breaks_is_right(backend: str, step: Any) -> None:
    x = leaf(4, 8)
    compiled = torch.compile(step, backend=backend)
    assert_same_step(lambda: step(x), lambda: compiled(x), [x, *BLOCK.parameters()])


@quiet
def test_a_region_in_which_the_graph_breaks_is_replayed_by_us() -> None:
    with rekindle.observe() as seen:
        torch.compile(run, backend="aot_eager")(leaf(4, 8)).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (1, 1)


def test_the_warning_names_the_region_the_line_and_the_reason() -> None:
    line = broken.__code__.co_firstlineno + 2
    with pytest.warns(UserWarning, match="The region broken is called in compiled code") as found:
        torch.compile(run, backend="eager")(leaf(4, 8))
    (warning,) = found
    assert f'{__file__}", line {line}, in broken: Call to `torch._dynamo.graph_' in str(
        warning.message
    )


def test_the_warning_points_at_the_call_of_the_region() -> None:
    with pytest.warns(UserWarning, match="The region broken") as found:
        torch.compile(run, backend="eager")(leaf(4, 8))
    assert (found[0].filename, found[0].lineno) == (__file__, run.__code__.co_firstlineno + 1)


def test_the_warning_comes_once() -> None:
    compiled = torch.compile(run, backend="eager")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            compiled(leaf(4, 8)).sum().backward()
    assert [str(w.message)[:17] for w in found] == ["The region broken"]


@quiet
def test_what_is_around_such_a_region_is_compiled() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([node.name for node in graph.graph.nodes if node.op != "placeholder"])
        return graph.forward

    torch.compile(run, backend=backend)(leaf(4, 8))
    assert [names[0] for names in graphs] == ["cos", "mul"]


@quiet
def test_steps_with_such_a_region_do_not_compile_anew() -> None:
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(run, backend=counter)
    compiled(leaf(4, 8)).sum().backward()
    once = counter.frame_count
    for _ in range(4):
        compiled(leaf(4, 8)).sum().backward()
    assert counter.frame_count == once


def test_a_full_graph_makes_an_error_of_it() -> None:
    with pytest.raises(Exception, match="graph_break"):
        torch.compile(run, backend="eager", fullgraph=True)(leaf(4, 8))


def test_an_eager_region_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    run(leaf(4, 8)).sum().backward()
    assert not recwarn.list


def test_a_region_of_a_function_that_is_not_to_be_compiled_says_nothing(
    recwarn: pytest.WarningsRecorder,
) -> None:
    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        return torch.compiler.disable(run)(x) * 2  # type: ignore[no-any-return]

    step(leaf(4, 8)).sum().backward()
    assert not recwarn.list
