"""The bytes that a tier has room for: of host memory, or of a disk."""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from rekindle.strategy import TierName

_SPARED = 0.1
"""The share of the machine's memory, or of the disk, that is left alone."""


def tier_room(tier: TierName) -> int | None:
    """The bytes that may still be copied to a tier; None where the system does not tell."""
    if tier == "host":
        left = host_memory_left()
        return None if left == float("inf") else max(int(left), 0)
    with suppress(OSError):
        disk = shutil.disk_usage(tempfile.gettempdir())
        return max(int(disk.free - _SPARED * disk.total), 0)
    return None


def host_memory_left() -> float:
    """The bytes of host memory that may still be taken; infinity where the system does not tell."""
    left = float("inf")
    with suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, rest in (x.split(":") for x in lines)}
        left = sizes["MemAvailable"] - _SPARED * sizes["MemTotal"]
    with suppress(OSError, ValueError):  # of a container, which may have less
        most, now = (
            int(Path(f"/sys/fs/cgroup/memory.{x}").read_text()) for x in ("max", "current")
        )
        left = min(left, (1 - _SPARED) * most - now)
    return left
