"""How long work takes on a device that is kept busy, as in the middle of a step."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from rekindle.planner.devices import Device, estimating
from rekindle.torch_private.cuda import spin_device

RUNS = 3
"""How often something is timed; the shortest counts."""


class Clock(Protocol):
    """Where times come from: from what runs, or from what is known of a device."""

    is_exact: bool
    """Whether the same work takes the same time, from the first run on."""
    runs: int
    """How often a block is timed; the shortest counts."""
    estimates: Device
    """By which ops are compared where times would be too noisy."""

    def keep_busy(self, seconds: float) -> None:
        """Before a block is run alone: as if it were in the middle of a step."""

    def mark(self) -> Any:
        """A point in time."""

    def seconds(self, begin: Any, end: Any) -> float:
        """What the device takes between two points."""

    def host_seconds(self, begin: Any, end: Any) -> float:
        """What the host takes, where it works beside the device; else 0."""

    def timed(self, step: Callable[[], None]) -> float:
        """Seconds that a step takes, from an idle device to an idle device."""


class DeviceClock:
    """Times work as it takes when the host runs ahead of the device.

    In the middle of a step the device has work queued, so a host that is slower for a moment is not
    felt. Alone, a block would wait for the host at every op. So the device is kept busy first.
    """

    is_exact = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.runs = _RUNS_BESIDE_A_HOST if self._is_cuda else RUNS
        self.estimates = estimating(device)

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


_RUNS_BESIDE_A_HOST = 5
"""Hosts are less steady than devices."""
_CYCLES = 2e9
"""Of a device, about, in a second."""


def now(device: torch.device) -> float:
    """Seconds on a clock, once the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Seconds that a step takes, from an idle device to an idle device."""
    taken = []
    for _ in range(RUNS):
        start = now(device)
        step()
        taken.append(now(device) - start)
    return min(taken)
