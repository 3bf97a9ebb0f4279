"""Clocks that time work on a device that is kept busy, as in the middle of a step."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from rekindle.planner.devices import Device, comparison_device
from rekindle.planner.ranks.rank_sync import all_gather
from rekindle.torch_private.cuda import spin_device

RUNS = 3
"""Runs of which the shortest counts."""


class Clock(Protocol):
    """A source of times: of work that runs, or of a table of devices."""

    is_exact: bool
    """True if the same work takes the same time, from the first run on."""
    runs: int
    """Runs of a block of which the shortest counts."""
    estimates: Device
    """The device by whose table ops are compared, where measured times would be too noisy."""

    def keep_busy(self, seconds: float) -> None:
        """Give the device work for some seconds, so that what follows is queued as in a step."""

    def mark(self) -> Any:
        """Return a point in time."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds of the device between two points."""

    def host_seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds of the host, where it works beside the device; else 0."""

    def timed(self, step: Callable[[], None]) -> float:
        """Return the seconds that a step takes, from an idle device to an idle device."""


class DeviceClock:
    """Times work as in a step whose host runs ahead of the device.

    In the middle of a step the device has work queued, so it does not wait for a host that is slow
    for a moment. A block that runs alone would wait for the host at every op. So the device is kept
    busy first.
    """

    is_exact = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.runs = _RUNS_BESIDE_A_HOST if self._is_cuda else RUNS
        self.estimates = comparison_device(device)

    def keep_busy(self, seconds: float) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
            spin_device(int(seconds * _CYCLES))

    def mark(self) -> tuple[float, Any]:
        host = time.perf_counter()
        if not self._is_cuda:
            return host, None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return host, event

    def host_seconds(self, begin: tuple[float, Any], end: tuple[float, Any]) -> float:
        return end[0] - begin[0] if self._is_cuda else 0.0

    def seconds(self, begin: tuple[float, Any], end: tuple[float, Any]) -> float:
        if not self._is_cuda:
            return end[0] - begin[0]
        end[1].synchronize()
        return float(begin[1].elapsed_time(end[1])) / 1e3

    def timed(self, step: Callable[[], None]) -> float:
        return timed(step, self._device)


_RUNS_BESIDE_A_HOST = 1
"""Runs where the device is kept busy: its times vary little, and the host's are those of whole
steps in the end."""
_CYCLES = 2e9
"""Cycles of a device in a second, about."""


def now(device: torch.device) -> float:
    """Return the time in seconds, once the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Return the seconds that a step takes, from an idle device to an idle device."""
    return min(times_of(step, device))


def times_of(step: Callable[[], None], device: torch.device) -> list[float]:
    """Return the seconds of a few runs of a step; as many on all ranks.

    It runs three times at most, and no more once two runs took the same time, or all took long.
    """
    seconds: list[float] = []
    of_ranks: list[float] = []
    while len(seconds) < RUNS and sum(of_ranks) < LONG and not _agree(of_ranks):
        start = now(device)
        step()
        seconds.append(now(device) - start)
        of_ranks.append(max(all_gather(seconds[-1])))
    return seconds


def _agree(seconds: list[float]) -> bool:
    """Return whether several runs took the same time, as far as that can be told."""
    return len(seconds) > 1 and max(seconds) - min(seconds) <= _ALIKE * min(seconds)


LONG = 1.0
"""Seconds after which no further run is timed."""
_ALIKE = 0.02
"""Share of a step's time by which two runs of it may differ and count as the same."""
