"""Compares the gradients of a region with those of the plain run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rekindle
from tests.toys import same_bits


def plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def three(x: Tensor) -> Tensor:
    """Three ops; autograd saves the input of each, so two activations beside the argument."""
    return x.sin().exp().cos()


def assert_same_grads(ways: Callable[[Callable[..., Any]], Any]) -> None:
    """`ways(run)` returns the same tensors, bit for bit, plain and checkpointed."""
    torch.manual_seed(0)
    a = ways(plain)
    torch.manual_seed(0)
    b = ways(rekindle.checkpoint)
    assert len(a) == len(b) > 0
    for one, other in zip(a, b, strict=True):
        assert one is not None
        assert same_bits(one, other)


def replays(step: Callable[[], Any]) -> int:
    with rekindle.observe() as seen:
        step()
    return seen.total.replays
