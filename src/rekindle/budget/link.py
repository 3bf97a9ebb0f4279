"""How fast activations leave the device and come back."""

import tempfile
import time

import torch

from rekindle.budget.timing import RUNS, now
from rekindle.offload.spill_file import SpillFile, wait_for

_BYTES = 128 << 20


def bytes_per_second(device: torch.device, tier: str) -> float:
    """To a tier and back, whichever is slower; 0 if there is no way."""
    if device.type not in ("cuda", "cpu"):
        return 0.0
    if tier == "disk":
        return min(_disk(), _pinned(device)) if device.type == "cuda" else _disk()
    return _pinned(device) if device.type == "cuda" else 0.0


def _pinned(device: torch.device) -> float:
    there = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    taken = [0.0] * RUNS
    for i in range(RUNS):
        start = now(device)
        here.copy_(there, non_blocking=True)
        taken[i] = now(device) - start
    return _BYTES / min(taken)


def _disk() -> float:
    """Of the folder for temporary files."""
    file = SpillFile(tempfile.gettempdir())
    data = torch.zeros(_BYTES, dtype=torch.uint8)
    start = file.take(_BYTES)
    taken = []
    for work in [file.write, file.read] * RUNS:
        begin = time.perf_counter()
        wait_for(work(data, start))
        taken.append(time.perf_counter() - begin)
    return _BYTES / max(min(taken[0::2]), min(taken[1::2]))
