"""A graph break inside a region: still right, still a region of ours, and said once."""

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import rekindle
from rekindle import policies
from tests.graphs import TORCHS_WARNINGS
from tests.toys import Block, assert_same_step, leaf

pytestmark = TORCHS_WARNINGS


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


@pytest.fixture
def nested_graph_breaks() -> Iterator[None]:
    with torch._dynamo.config.patch(nested_graph_breaks=True):
        yield
        assert torch._dynamo.config.nested_graph_breaks


def run_by_torchs_name(x: Tensor) -> Tensor:
    checkpoint = torch.utils.checkpoint.checkpoint
    return checkpoint(broken, x.cos(), use_reentrant=False) * 2  # type: ignore[no-any-return]


def run_with_a_policy_by_torchs_name(x: Tensor) -> Tensor:
    checkpoint, policy = torch.utils.checkpoint.checkpoint, policies.keep_matmuls
    return checkpoint(broken, x.cos(), use_reentrant=False, context_fn=policy) * 2  # type: ignore[no-any-return]


@rekindle.checkpoint(context_fn=policies.keep_matmuls)
def decorated(x: Tensor) -> Tensor:
    return broken(x)


def run_a_policy_that_is_made_inside(x: Tensor) -> Tensor:
    policy = policies.keep(torch.ops.aten.addmm) | policies.recompute()
    return rekindle.checkpoint(broken, x.cos(), context_fn=policy) * 2  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The region .* is called in compiled code")
@pytest.mark.usefixtures("nested_graph_breaks")
@pytest.mark.parametrize("is_patched", [False, True], ids=["", "patched"])
@pytest.mark.parametrize(
    "step", [run, run_with_a_policy, run_a_policy_that_is_made_inside, decorated]
)
def test_with_nested_graph_breaks_a_region_that_breaks_is_replayed_by_us(
    step: Any, is_patched: bool
) -> None:
    x = leaf(4, 8)
    compiled = torch.compile(lambda x: step(x.sin()), backend="aot_eager")
    with rekindle.patch_torch() if is_patched else nullcontext(), rekindle.observe() as seen:
        assert_same_step(
            lambda: broken(x.sin()) if step is decorated else broken(x.sin().cos()) * 2,
            lambda: compiled(x),
            [x, *BLOCK.parameters()],
        )
    assert seen.total.forwards == seen.total.replays == 1


@pytest.mark.filterwarnings("ignore:The region .* is called in compiled code")
@pytest.mark.usefixtures("nested_graph_breaks")
@pytest.mark.parametrize("step", [run_by_torchs_name, run_with_a_policy_by_torchs_name])
def test_with_nested_graph_breaks_we_are_not_called_in_torchs_place_for_ever(step: Any) -> None:
    x = leaf(4, 8)
    with rekindle.patch_torch(), rekindle.observe() as seen:
        compiled = torch.compile(step, backend="aot_eager")
        assert_same_step(lambda: broken(x.cos()) * 2, lambda: compiled(x), [x, *BLOCK.parameters()])
    assert seen.total.forwards == seen.total.replays == 1


@pytest.mark.usefixtures("nested_graph_breaks")
def test_with_nested_graph_breaks_what_is_around_a_region_is_compiled_as_with_torch() -> None:
    def inner(x: Tensor, checkpoint: Any) -> Tensor:
        y = checkpoint(broken, x.sin(), use_reentrant=False).exp()
        return y.sin()  # type: ignore[no-any-return]

    def outer(x: Tensor, checkpoint: Any) -> Tensor:
        return inner(x.cos(), checkpoint).tanh()

    ops: list[list[str]] = []
    for checkpoint in (torch.utils.checkpoint.checkpoint, rekindle.checkpoint):
        torch.compiler.reset()
        found: list[str] = []

        def noted(graph: Any, _: Any, found: list[str] = found) -> Any:
            found += [str(n.target) for n in graph.graph.nodes if n.op == "call_method"]
            return graph

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(outer, backend=noted)(leaf(4, 8), checkpoint)
        ops.append(found)
    assert ops[1] == ["cos", "sin", "exp", "sin", "tanh"]
    assert {*ops[1]} <= {*ops[0]}
