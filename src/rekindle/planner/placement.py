"""The device that a model computes on."""

import torch
from torch import Tensor, nn


def compute_device(model: nn.Module) -> torch.device:
    """Return the device that a model computes on: its parameters', or an accelerator they go to.

    Some or all of them may rest in host memory, as under FSDP2's `CPUOffloadPolicy`, and come to
    the accelerator when they are needed.
    """
    devices = [_computed_on(tensor) for tensor in (*model.parameters(), *model.buffers())]
    accelerators = (device for device in devices if device.type not in ("cpu", "meta"))
    return next(accelerators, devices[0])


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a device has room for now; None where memory is not the device's."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _computed_on(tensor: Tensor) -> torch.device:
    """Return the device of a tensor; of a sharded one, that of its mesh, which gathers it there."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None or mesh.device_type == tensor.device.type:
        return tensor.device
    index: int = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)


def is_on(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on a device; on any of its type, if that has no index."""
    there = tensor.device
    return there.type == device.type and device.index in (None, there.index)
