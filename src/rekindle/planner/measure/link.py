"""Measures the link to host memory or disk: its bandwidth, and the room at its other end."""

import os
import socket
import tempfile
from contextlib import suppress

import torch
from torch import Tensor

from rekindle.errors import OffloadError
from rekindle.offload.tiers.room import tier_room
from rekindle.offload.tiers.spill_file import SpillFile, wait_for
from rekindle.planner.instruments.timing import timed
from rekindle.planner.ranks.rank_sync import all_gather
from rekindle.sizes import format_bytes
from rekindle.strategy import TierName

_BYTES = 128 << 20


def link_bandwidth(device: torch.device, tier: TierName) -> float:
    """Return the bytes a second to a tier or back, whichever is slower; 0 if there is no link."""
    if device.type == "cuda":
        return (
            min(_disk_bandwidth(), _pinned_bandwidth(device))
            if tier == "disk"
            else _pinned_bandwidth(device)
        )
    return _disk_bandwidth() if (device.type, tier) == ("cpu", "disk") else 0.0


def tier_share(tier: TierName) -> int | None:
    """This rank's share of the room in a tier, which the ranks of one machine have in common."""
    machine, room = socket.gethostname(), tier_room(tier)
    here = all_gather(machine).count(machine)
    with suppress(ValueError):  # ranks of other groups, such as other stages of a pipeline, too
        here = max(here, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return None if room is None else room // here


def _pinned_bandwidth(device: torch.device) -> float:
    on_device = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    on_host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy(to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=True)

    out = timed(lambda: copy(on_host, on_device), device)
    return _BYTES / max(out, timed(lambda: copy(on_device, on_host), device))


def _disk_bandwidth() -> float:
    """The bandwidth of the folder for temporary files."""
    folder = tempfile.gettempdir()
    file = SpillFile(folder)
    data = torch.zeros(_BYTES, dtype=torch.uint8)
    try:
        start = file.lease(_BYTES)
        out = timed(lambda: wait_for(file.write(data, start)), data.device)
        back = timed(lambda: wait_for(file.read(data, start)), data.device)
    except OSError as error:
        raise OffloadError(
            f"spill=True writes {format_bytes(_BYTES)} to the folder for temporary files, "
            f"{folder}, to see how fast it is, and could not: {error}. TMPDIR names another."
        ) from error
    return _BYTES / max(out, back)
