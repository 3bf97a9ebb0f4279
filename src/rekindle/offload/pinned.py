"""Host memory that a device can copy to and from by itself: a pool that grows in the first step.

Memory is pinned in slabs, page by page, which takes about as long as copying four times as much;
so slabs are never given back between steps, only by `trim`. A room may be given back while the
device still reads it: whoever writes to the pool has the device wait for `last_read` first.
"""

import mmap
import warnings
from collections import deque
from contextlib import suppress
from pathlib import Path
from weakref import finalize

import torch
from torch import Tensor

from rekindle.offload.arena import Arena, aligned
from rekindle.sizes import format_bytes

_SLAB = 256 * 2**20
_FIRST_SLAB = 32 * 2**20
_SPARED = 0.1
"""The share of the machine's memory that pinning leaves alone."""


class Room:
    """Some bytes of the pool, taken by one copy."""

    __slots__ = ("buffer", "read", "slab", "start")

    def __init__(self, slab: "_Slab", start: int, nbytes: int) -> None:
        self.slab = slab
        self.start = start
        self.buffer = slab.memory[start : start + nbytes]
        self.read: tuple[int, torch.cuda.Event] | None = None
        """The last read of these bytes: its number, in the order of reads, and when it is over."""


class PinnedPool:
    """Rooms in pinned memory, at most `max_bytes` in all."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._slabs: list[_Slab] = []
        self._returned: deque[Room] = deque()
        self.last_read: tuple[int, torch.cuda.Event] | None = None
        """The last read of any room that was given back: a new write has to wait for it."""

    @property
    def size(self) -> int:
        return sum(slab.arena.size for slab in self._slabs)

    def take(self, nbytes: int) -> Room | None:
        """Room for `nbytes`, or None: the cap is reached."""
        self._take_back()
        for slab in self._slabs:
            start = slab.arena.take(nbytes)
            if start is not None:
                return Room(slab, start, nbytes)
        if not self._grow(aligned(nbytes)):
            return None
        slab = self._slabs[-1]
        start = slab.arena.take(nbytes)
        assert start is not None, "a new slab holds what it was made for"
        return Room(slab, start, nbytes)

    def give_back(self, room: Room) -> None:
        """Free a room; from any thread, at any moment."""
        self._returned.append(room)

    def shrink(self, nbytes: int) -> None:
        """Unpin slabs that nobody uses, but keep enough for `nbytes`, cut up as they may be."""
        self._take_back()
        for slab in reversed(self._slabs):
            if not slab.arena.is_unused or self.size - slab.arena.size < nbytes + _SLAB:
                return
            self._slabs.remove(slab)

    def trim(self) -> None:
        """Unpin the slabs that nobody uses."""
        self._take_back()
        for slab in [slab for slab in self._slabs if slab.arena.is_unused]:
            self._slabs.remove(slab)

    def _take_back(self) -> None:
        while self._returned:
            room = self._returned.popleft()
            if room.read and (self.last_read is None or room.read[0] > self.last_read[0]):
                self.last_read = room.read
            room.slab.arena.give_back(room.start, room.buffer.numel())

    def _grow(self, nbytes: int) -> bool:
        """Add a slab of at least `nbytes`, a larger one if there is room for it."""
        wished = max(nbytes, min(_SLAB, max(_FIRST_SLAB, self.size)))
        for length in dict.fromkeys((wished, nbytes)):
            below_cap = self.max_bytes is None or self.size + length <= self.max_bytes
            if below_cap and length <= _memory_left():
                self._slabs.append(_Slab(length))
                return True
        return False


class _Slab:
    """One stretch of pinned memory."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        # Large pages are pinned faster, where there are any.
        with suppress(AttributeError, OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.arena = Arena(nbytes)
        if pin(self.memory):
            finalize(self, unpin, self.memory).atexit = False


def pin(memory: Tensor) -> bool:
    """Pin a stretch of memory; where that fails, warn and leave it: copies then take longer."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error) == 0:
        return True
    with suppress(RuntimeError):  # the next kernel reports the error that nobody took: this one
        torch.zeros(1, device="cuda")
    warnings.warn(
        f"rekindle.offload: {format_bytes(memory.numel())} of host memory could not be pinned "
        f"(CUDA error {int(error)}): activations go to ordinary memory, and training waits.",
        stacklevel=2,
    )
    return False


def unpin(memory: Tensor) -> None:
    """Undo `pin`, when the device has done with the memory."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _memory_left() -> float:
    """Bytes that may still be pinned on this machine; as many as one likes where it cannot tell."""
    with suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, rest in (x.split(":") for x in lines)}
        return sizes["MemAvailable"] - _SPARED * sizes["MemTotal"]
    return float("inf")
