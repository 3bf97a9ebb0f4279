"""Device memory that regions hold, and autograd's own threads."""

from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from tests.toys import Block, Stack, assert_same_step

pytestmark = pytest.mark.gpu


# Memory


def test_after_forward_a_region_holds_its_input_and_output_alone() -> None:
    block = Block(512).cuda()
    x = torch.randn(1024, 512, device="cuda", requires_grad=True)
    rekindle.checkpoint(block, x).sum().backward()  # workspaces and gradients are there from now on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = rekindle.checkpoint(block, x)
    assert torch.cuda.memory_allocated() - before == y.nbytes


def test_after_backward_a_region_holds_nothing() -> None:
    block = Block(512, drop=0.1).cuda()
    x = torch.randn(1024, 512, device="cuda", requires_grad=True)
    rekindle.checkpoint(block, x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    rekindle.checkpoint(block, x).sum().backward()
    assert torch.cuda.memory_allocated() == before


def test_a_stack_of_regions_holds_one_tensor_each() -> None:
    depth, model = 4, Stack(depth=4, dim=512).cuda()
    x = torch.randn(1024, 512, device="cuda", requires_grad=True)
    model(x, rekindle.checkpoint).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = model(x, rekindle.checkpoint)
    assert torch.cuda.memory_allocated() - before == depth * y.nbytes


def test_an_exception_in_forward_holds_no_memory(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        x.exp().sin()
        raise KeyError("in forward")

    before = torch.cuda.memory_allocated()
    with pytest.raises(KeyError):
        rekindle.checkpoint(region, x)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("policy", [None, rekindle.policies.recompute()])
def test_a_region_that_differentiates_twice_saves_in_a_thread_of_autograds(
    x: Tensor, policy: Any
) -> None:
    """That thread runs no Python but the hook: there is no call to take down."""

    def region(x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
        return slope * x

    options = {} if policy is None else {"context_fn": policy}
    assert_same_step(
        lambda: region(x), lambda: rekindle.checkpoint(region, x, **options), leaves=[x]
    )
