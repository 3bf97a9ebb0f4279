"""Losses under `torch.compile`: one graph, and the gradients of the eager run."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from tests.graphs import fresh_compiler
from tests.losses.heads import head, some_labels
from tests.toys import assert_same_step


@pytest.fixture(autouse=True)
def fresh() -> Any:
    with fresh_compiler():
        yield


def whole(function: Any, **options: Any) -> Any:
    """Compiled as one graph, or an error."""
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "none"},
        {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0},
    ],
    ids=str,
)
def test_a_loss_compiles_and_gives_eager_gradients(options: dict[str, Any], exact: bool) -> None:
    hidden, weight, bias = head()
    run = functools.partial(
        rekindle.linear_cross_entropy, labels=some_labels(), tile=7, exact=exact, **options
    )
    compiled = whole(lambda h, w, b: run(h, w, bias=b))
    assert_same_step(
        lambda: run(hidden, weight, bias=bias),
        lambda: compiled(hidden, weight, bias),
        [hidden, weight, bias],
    )


@pytest.mark.parametrize("exact", [True, False])
def test_a_loss_under_autocast_compiles_and_gives_eager_gradients(exact: bool) -> None:
    hidden, weight, _ = head()

    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return rekindle.linear_cross_entropy(
                hidden.tanh(), weight, some_labels_now, exact=exact, tile=7
            )

    some_labels_now = some_labels()
    compiled = whole(run)
    assert_same_step(
        lambda: run(hidden, weight), lambda: compiled(hidden, weight), [hidden, weight]
    )


@pytest.mark.parametrize("exact", [True, False])
def test_log_probs_and_entropy_compile_and_give_eager_gradients(exact: bool) -> None:
    hidden, weight, _ = head()
    labels = some_labels()

    def run(hidden: Tensor, weight: Tensor) -> Any:
        return rekindle.linear_log_probs(
            hidden, weight, labels, temperature=0.7, entropy=True, exact=exact, tile=7
        )

    compiled = whole(run)
    assert_same_step(
        lambda: run(hidden, weight), lambda: compiled(hidden, weight), [hidden, weight]
    )


@pytest.mark.parametrize("exact", [True, False])
def test_any_function_per_token_compiles_and_gives_eager_outputs(exact: bool) -> None:
    hidden, weight, bias = head(torch.float64)
    labels = some_labels(ignored=0)

    def picked(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return rekindle.linear_per_token(
            hidden, weight, picked, labels, bias=bias, exact=exact, tile=15
        )

    leaves = hidden, weight, bias
    out, compiled = run(*leaves), whole(run)(*leaves)
    torch.testing.assert_close(compiled, out)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.sum(), leaves), torch.autograd.grad(out.sum(), leaves)
    )


@pytest.mark.parametrize("exact", [True, False])
def test_one_graph_serves_any_number_of_tokens(exact: bool) -> None:
    hidden, weight, _ = head()
    rows, labels = hidden.detach().flatten(0, 1), some_labels().flatten()
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def run(rows: Tensor, labels: Tensor) -> Tensor:
        return rekindle.linear_cross_entropy(rows, weight, labels, exact=exact)

    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (5, 9, 33):
        given = rows[:tokens], labels[:tokens]
        torch.testing.assert_close(compiled(*given), run(*given))
    assert len(graphs) == 1


def test_a_loss_in_a_compiled_region_gives_eager_gradients() -> None:
    hidden, weight, _ = head()
    labels = some_labels()

    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        return rekindle.linear_cross_entropy(hidden.tanh(), weight, labels, tile=7)

    compiled = whole(lambda h, w: rekindle.checkpoint(run, h, w))
    assert_same_step(
        lambda: run(hidden, weight), lambda: compiled(hidden, weight), [hidden, weight]
    )
