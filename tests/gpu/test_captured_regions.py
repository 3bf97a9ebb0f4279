"""Regions in captured CUDA graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

import rekindle
from tests.gpu.plain_steps import Run, plain
from tests.toys import Stack, same_bits, total

pytestmark = pytest.mark.gpu


# Graph capture (field note 28)


def _warmed_up(step: Callable[[], Any], leaves: list[Tensor]) -> None:
    """What capture asks for: a few steps on a side stream, and no gradients left."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
            for leaf in leaves:
                leaf.grad = None
    torch.cuda.current_stream().wait_stream(side)


def test_a_captured_step_draws_one_mask_for_forward_and_replay() -> None:
    x = torch.ones(4096, device="cuda", requires_grad=True)

    def step() -> Tensor:
        y = rekindle.checkpoint(dropout, x, 0.5)
        y.sum().backward()
        return y

    _warmed_up(step, [x])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for _ in range(3):
        graph.replay()
        assert x.grad is not None
        assert torch.equal(x.grad != 0, y != 0)


def test_a_captured_step_draws_a_new_mask_each_time_it_runs() -> None:
    x = torch.ones(4096, device="cuda", requires_grad=True)

    def step() -> Tensor:
        y = rekindle.checkpoint(dropout, x, 0.5)
        y.sum().backward()
        return y

    _warmed_up(step, [x])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append((y != 0).clone())
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_a_captured_stack_with_dropout_draws_what_the_captured_plain_one_draws() -> None:
    model = Stack(depth=3, dim=64, drop=0.3).cuda()
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    leaves = [x, *model.parameters()]
    found: list[list[Tensor]] = []
    for run in (plain, rekindle.checkpoint):

        def step(run: Run = run) -> Tensor:
            y = model(x, run)
            total(y).backward()
            return y

        for leaf in leaves:
            leaf.grad = None
        _warmed_up(step, leaves)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step()
        torch.manual_seed(11)
        seen = []
        for _ in range(2):
            graph.replay()
            seen += [t.detach().clone() for t in (y, *(leaf.grad for leaf in leaves))]
        found.append(seen)
        del graph, y  # whose graph has the leaves' nodes on the stream of the capture
    for a, b in zip(*found, strict=True):
        assert same_bits(a, b)


def test_a_captured_forward_and_backward_of_two_regions_in_nested_form() -> None:
    x = torch.ones(4096, device="cuda", requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        return dropout(x, 0.5)

    def step() -> Tensor:
        y = rekindle.checkpoint(lambda x: rekindle.checkpoint(inner, dropout(x, 0.5)), x)
        y.sum().backward()
        return y

    _warmed_up(step, [x])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for _ in range(2):
        graph.replay()
        assert x.grad is not None
        assert torch.equal(x.grad != 0, y != 0)


def test_numbers_after_a_capture_are_as_after_a_plain_one(x: Tensor) -> None:
    """A capture moves the generator no further than the plain step's would."""
    states = []
    for run in (plain, rekindle.checkpoint):

        def step(run: Run = run) -> None:
            run(dropout, x, 0.5).sum().backward()

        _warmed_up(step, [x])
        graph = torch.cuda.CUDAGraph()
        torch.manual_seed(0)
        with torch.cuda.graph(graph):
            step()
        torch.manual_seed(0)
        graph.replay()
        states.append(torch.cuda.get_rng_state())
        x.grad = None
        del graph
    assert torch.equal(*states)
