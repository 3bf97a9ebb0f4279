"""CUDA: questions that must not start it, and a kernel that does nothing for a while."""

from collections.abc import Callable

import torch

cuda_in_use: Callable[[], bool] = torch.cuda.is_initialized
"""True if this process has begun to use CUDA. Public, and bound here for hot paths; tried on torch
2.11 and 2.13. Goes when `current_cuda_device` does."""

current_cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
"""Index of the current CUDA device, once CUDA is in use.

Tried on torch 2.11 and 2.13. The public form, `torch.cuda.current_device`, begins to use CUDA, and
is slower. Goes when it is neither."""


def is_capturing() -> bool:
    """True if a CUDA graph is captured on the current stream: nothing may wait for the device.

    Public names, tried on torch 2.11 and 2.13. Goes when torch's own question does not need CUDA.
    """
    return cuda_in_use() and torch.cuda.is_current_stream_capturing()


def device_segments(device: torch.device) -> int:
    """Number of times that the allocator has asked a device's driver for memory so far.

    A documented statistic, tried on torch 2.11 and 2.13. Goes when it has a function of its own.
    """
    return int(torch.cuda.memory_stats(device).get("segment.all.allocated", 0))


def spin_device(cycles: int) -> None:
    """Keep the current CUDA stream busy for a number of clock cycles.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    torch.cuda._sleep(cycles)
