"""How fast activations leave the device and come back."""

import tempfile

import torch
from torch import Tensor

from rekindle.errors import OffloadError
from rekindle.offload.offload_options import TierName
from rekindle.offload.tiers.spill_file import SpillFile, wait_for
from rekindle.planner.measure.timing import timed
from rekindle.sizes import format_bytes

_BYTES = 128 << 20


def bytes_per_second(device: torch.device, tier: TierName) -> float:
    """To a tier and back, whichever is slower; 0 if there is no way."""
    if device.type == "cuda":
        return min(_disk(), _pinned(device)) if tier == "disk" else _pinned(device)
    return _disk() if (device.type, tier) == ("cpu", "disk") else 0.0


def _pinned(device: torch.device) -> float:
    there = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)

    def copied(to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)

    out = timed(lambda: copied(here, there), device)
    return _BYTES / max(out, timed(lambda: copied(there, here), device))


def _disk() -> float:
    """Of the folder for temporary files."""
    folder = tempfile.gettempdir()
    file = SpillFile(folder)
    data = torch.zeros(_BYTES, dtype=torch.uint8)
    try:
        start = file.take(_BYTES)
        out = timed(lambda: wait_for(file.write(data, start)), data.device)
        back = timed(lambda: wait_for(file.read(data, start)), data.device)
    except OSError as error:
        raise OffloadError(
            f"spill=True writes {format_bytes(_BYTES)} to the folder for temporary files, "
            f"{folder}, to see how fast it is, and could not: {error}. TMPDIR names another."
        ) from error
    return _BYTES / max(out, back)
