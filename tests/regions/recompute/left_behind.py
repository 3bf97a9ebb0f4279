"""What a region may touch and must put back."""

from typing import Any

import torch
from torch import Tensor

import rekindle


class Boom(Exception):  # noqa: N818
    """Only these tests raise it."""


def ambient_state() -> tuple[Any, ...]:
    """All that a region may touch and must put back."""
    return (
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        rekindle.is_recomputing(),
        torch.get_rng_state().sum().item(),
    )


def fails_in_replay(x: Tensor) -> Tensor:
    x = x.exp()
    if rekindle.is_recomputing():
        raise Boom
    return x.sin()
