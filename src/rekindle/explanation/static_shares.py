"""Bytes that are there all the time, by module and kind."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rekindle.modules.unwrapping import places
from rekindle.planner.instruments.memory_meter import bytes_of, storages_of
from rekindle.planner.placement import is_on
from rekindle.torch_private.storages import storage_key


class Held(NamedTuple):
    """The place of bytes that are there all the time."""

    module: str
    kind: str


def static_shares(
    model: nn.Module, device: torch.device, batch: list[Tensor], optimizer: int, total: int
) -> Counter[Held]:
    """Return the bytes of the model, its gradients, the optimizer's state and the batch.

    They add up to `total`, which is what the planner counts. A tensor that several modules share
    counts for the first. The optimizer's state is divided among the parameters that are trained, by
    their bytes.
    """
    found: Counter[Held] = Counter()
    seen: set[int] = set()
    trained: Counter[str] = Counter()
    for path, place in places(model).items():
        module = model.get_submodule(place)
        for parameter in module._parameters.values():
            nbytes = _new_bytes(parameter, device, seen)
            found[Held(path, "parameters")] += nbytes
            if parameter is not None and parameter.requires_grad:
                trained[path] += nbytes
        for buffer in module._buffers.values():
            found[Held(path, "buffers")] += _new_bytes(buffer, device, seen)
    for path, nbytes in trained.items():
        found[Held(path, "gradients")] = nbytes
    for path, nbytes in _divided(optimizer, trained).items():
        found[Held(path, "optimizer")] = nbytes
    found[Held("", "batch")] = bytes_of(tensor for tensor in batch if is_on(tensor, device))
    found[Held("", "other")] = total - sum(found.values())
    return +found


def _new_bytes(tensor: Tensor | None, device: torch.device, seen: set[int]) -> int:
    """Bytes of a tensor's storages that were not seen before."""
    if tensor is None or not is_on(tensor, device):
        return 0
    fresh = {storage_key(s): s.nbytes() for s in storages_of(tensor) if storage_key(s) not in seen}
    seen.update(fresh)
    return sum(fresh.values())


def _divided(total: int, weights: Counter[str]) -> dict[str, int]:
    """Return a number divided by weights into whole numbers that add up to it."""
    if not weights:
        return {"": total}
    whole, so_far, given = sum(weights.values()), 0, 0
    found = {}
    for path, weight in weights.items():
        so_far += weight
        found[path] = total * so_far // max(whole, 1) - given
        given += found[path]
    return found


def kinds_of(shares: Iterable[tuple[Held, int]]) -> Counter[str]:
    """Return bytes by kind."""
    found: Counter[str] = Counter()
    for held, nbytes in shares:
        found[held.kind] += nbytes
    return found
