"""Compares a call as a region with the plain call."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rekindle
from tests.toys import assert_same_step


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def assert_same_as_plain(
    region: Callable[..., Any], leaves: list[Tensor], *args: Any, **kwargs: Any
) -> None:
    """The region runs, replays exactly once, and trains as the plain call does."""
    with rekindle.observe() as seen:
        assert_same_step(
            lambda: region(*args, **kwargs),
            lambda: rekindle.checkpoint(region, *args, **kwargs),
            leaves,
        )
    assert (seen.total.forwards, seen.total.replays) == (1, 1)
