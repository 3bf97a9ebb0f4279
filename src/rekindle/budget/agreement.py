"""Ranks of a distributed run agree: what one of them measured decides for all."""

from typing import TypeVar

import torch
import torch.distributed as dist

from rekindle.internals import FAKE, entered_mode

_Value = TypeVar("_Value")


def agreed(value: _Value) -> _Value:
    """The first rank's value, on every rank; this one's, without other ranks."""
    if not has_others():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def highest(value: int, device: torch.device) -> int:
    """The highest of all ranks' values."""
    if not has_others():
        return value
    tensor = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor.item())


def is_first() -> bool:
    """Whether this rank is the one that decides, and speaks."""
    return not has_others() or dist.get_rank() == 0


def has_others() -> bool:
    """Whether this is one of several ranks."""
    if entered_mode(FAKE) is not None:  # where nothing is measured, all find the same
        return False
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
