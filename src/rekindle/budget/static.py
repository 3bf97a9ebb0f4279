"""What is on the device all the time, whatever a plan does."""

from typing import Any

import torch
from torch import Tensor, nn

from rekindle.budget.memory import bytes_of


def static_bytes(
    model: nn.Module, optimizer: Any, device: torch.device, batch: list[Tensor]
) -> int:
    """Bytes of the model, its gradients, the optimizer's state and the batch: there all the time.

    On a GPU also what else there is, such as another model.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    total = bytes_of([*parameters, *model.buffers()]) + bytes_of(trained)
    total += bytes_of(batch)
    if optimizer is not None:
        total += optimizer_bytes(optimizer)
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


def optimizer_bytes(optimizer: Any) -> int:
    """The state of an optimizer, or what it will be after its first step; bytes are themselves."""
    if isinstance(optimizer, int):
        return optimizer
    held = [t for state in optimizer.state.values() for t in state.values()]
    tensors = [t for t in held if isinstance(t, Tensor)]
    if tensors:
        return bytes_of(tensors)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    options = optimizer.param_groups[0]
    count = _STATES.get(type(optimizer).__name__, 0)
    if type(optimizer).__name__ in ("SGD", "RMSprop"):
        count += bool(options.get("momentum"))
    count += bool(options.get("amsgrad")) + bool(options.get("centered"))
    return count * bytes_of(trained)
