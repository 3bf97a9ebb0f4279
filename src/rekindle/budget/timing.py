"""How long work takes on a device that is kept busy, as in the middle of a step."""

import time
from collections.abc import Callable
from typing import Any

import torch

RUNS = 3
"""How often something is timed; the shortest counts."""


class Stopwatch:
    """Times work as it takes when the host runs ahead of the device: the longer of the two.

    In the middle of a step the device has work queued, so a host that is slower for a moment is not
    felt. Alone, a block would wait for the host at every op. So the device is kept busy first.
    """

    def __init__(self, device: torch.device, busy: bool = True) -> None:
        self._device = device
        self._host = 0.0
        self._mark: Any = None
        if device.type == "cuda" and busy:
            torch.cuda.synchronize(device)
            torch.cuda._sleep(_HEAD_START)
        self.restart()

    def restart(self) -> None:
        self._host = time.perf_counter()
        if self._device.type == "cuda":
            self._mark = torch.cuda.Event(enable_timing=True)
            self._mark.record()

    def lap(self) -> "Stopwatch":
        """Another, that begins now."""
        return Stopwatch(self._device, busy=False)

    def seconds(self, end: "Stopwatch") -> float:
        """From the one to the other; waits for the device."""
        host = end._host - self._host
        if self._device.type != "cuda":
            return host
        torch.cuda.synchronize(self._device)
        return max(host, float(self._mark.elapsed_time(end._mark)) / 1e3)


_HEAD_START = 200_000_000
"""Cycles, about a tenth of a second."""


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
