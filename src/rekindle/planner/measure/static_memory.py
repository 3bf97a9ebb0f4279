"""Bytes that are on the device all the time, whatever a plan does."""

from typing import Any

import torch
from torch import Tensor, nn

from rekindle.planner.instruments.memory_meter import bytes_of
from rekindle.planner.placement import is_on
from rekindle.torch_private.fsdp import reshard


def static_bytes(
    model: nn.Module, optimizer: Any, device: torch.device, batch: list[Tensor]
) -> int:
    """Return the bytes of the model, its gradients, the optimizer's state and the batch.

    Of each counts what this rank has on the device: of a sharded parameter its shard, of one that
    rests in host memory nothing. On a GPU all else that is allocated counts, such as another model.
    """
    reshard(model)
    parameters = [p for p in model.parameters() if is_on(p, device)]
    trained = [p for p in parameters if p.requires_grad]
    total = bytes_of([*parameters, *(b for b in model.buffers() if is_on(b, device))])
    total += bytes_of(trained)
    total += bytes_of(tensor for tensor in batch if is_on(tensor, device))
    total += optimizer_bytes(optimizer, device)
    if device.type == "cuda":
        missing = bytes_of(p for p in trained if p.grad is None)  # gradients that are to come
        total = max(total, torch.cuda.memory_allocated(device) + missing)
    return total


_STATES = {
    "Adam": 2,
    "AdamW": 2,
    "RMSprop": 1,
    "Adagrad": 1,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Rprop": 2,
    "ASGD": 1,
    "SparseAdam": 2,
    "Muon": 1,
    "SGD": 0,
}
"""Tensors of a parameter's size that an optimizer keeps; more with some options."""


def optimizer_bytes(optimizer: Any, device: torch.device | None = None) -> int:
    """Return the bytes of an optimizer's state on a device, or on any.

    Before its first step, they are estimated by the optimizer's class and options. Of None that is
    0; a number of bytes is returned as it is.
    """
    if optimizer is None or isinstance(optimizer, int):
        return optimizer or 0
    held = [t for state in optimizer.state.values() for t in state.values()]
    tensors = [t for t in held if isinstance(t, Tensor)]
    if tensors:
        return bytes_of(t for t in tensors if device is None or is_on(t, device))
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    options = optimizer.param_groups[0]
    count = _STATES.get(type(optimizer).__name__, 0)
    if type(optimizer).__name__ in ("SGD", "RMSprop"):
        count += bool(options.get("momentum"))
    count += bool(options.get("amsgrad")) + bool(options.get("centered"))
    return count * bytes_of(p for p in trained if device is None or is_on(p, device))
