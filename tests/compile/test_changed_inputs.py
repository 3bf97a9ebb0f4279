"""Buffers that a compiled region changes in place and reads: gradients are those of eager code."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import policies
from tests.graphs import TORCHS_WARNINGS, Graphs

pytestmark = TORCHS_WARNINGS


class Average(nn.Module):
    """Follows the mean of what it sees in a buffer, and scales by it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.abs().mean(), 0.25)
        return (x * self.mean).sin()


class Counting(nn.Module):
    """Counts its calls in a view of a buffer, and adds the count."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls[1].add_(1)
        return (x + self.calls.sum()).sin()


def two_steps(run: Any, module: nn.Module) -> tuple[Tensor, ...]:
    x = torch.linspace(0.1, 2, 6).requires_grad_()
    for _ in range(2):
        run(x).sum().backward()
    assert x.grad is not None
    return x.grad, *module.buffers()


@pytest.mark.parametrize(
    ("kind", "backend"),
    [(Average, "aot_eager"), (Counting, "aot_eager"), (Average, "inductor")],
)
def test_a_buffer_that_a_region_changes_and_reads_is_in_backward_as_it_was(
    kind: type[nn.Module], backend: str
) -> None:
    plain, module = kind(), kind()
    run = torch.compile(
        lambda x: rekindle.checkpoint(module, x * 1.5), backend=backend, fullgraph=True
    )
    expected = two_steps(lambda x: plain(x * 1.5), plain)
    for one, other in zip(two_steps(run, module), expected, strict=True):
        torch.testing.assert_close(one, other)


POLICIES = [policies.recompute(), policies.keep("aten::mul"), policies.spill("aten::mul")]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_such_a_buffer_is_right_under_a_policy(policy: Any, written_at_once: None) -> None:
    plain, module = Average(), Average()
    run = torch.compile(
        lambda x: rekindle.checkpoint(module, x * 1.5, context_fn=policy),
        backend="aot_eager",
        fullgraph=True,
    )
    expected = two_steps(lambda x: plain(x * 1.5), plain)
    assert all(map(torch.equal, two_steps(run, module), expected))


def graphs_with(module: nn.Module) -> Graphs:
    graphs = Graphs()
    backend = graphs.backend(keep_inference_input_mutations=True)  # as aot_eager and inductor do
    run = torch.compile(lambda x: rekindle.checkpoint(module, x), backend=backend)
    run(torch.randn(4, 8, requires_grad=True)).sum().backward()
    return graphs


def test_only_an_input_that_changes_is_copied() -> None:
    assert graphs_with(Average()).times("clone") == (1, 0)
    assert graphs_with(nn.Linear(8, 8)).times("clone") == (0, 0)
