"""The context managers that steps run under, in a region and around it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def _copying_hooks() -> Iterator[None]:
    """Saved-tensor hooks of the user's, that hand back another tensor than they got."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        yield


BLOCKS: dict[str, Callable[[torch.device], AbstractContextManager[Any]]] = {
    "no_grad()": lambda device: torch.no_grad(),
    "enable_grad()": lambda device: torch.enable_grad(),
    "autocast(bfloat16)": lambda device: torch.autocast(device.type, torch.bfloat16),
    "autocast(bfloat16, cache_enabled=False)": lambda device: torch.autocast(
        device.type, torch.bfloat16, cache_enabled=False
    ),
    "autocast(enabled=False)": lambda device: torch.autocast(device.type, enabled=False),
    "sdpa_kernel(MATH)": lambda device: sdpa_kernel(SDPBackend.MATH),
    # On the CPU it hands back the very tensor: plain autograd then misses in-place ops, and leaks.
    "save_on_cpu()": lambda device: (
        torch.autograd.graph.save_on_cpu() if device.type != "cpu" else _copying_hooks()
    ),
}
GRAD_MODES = ("no_grad()", "enable_grad()")
