"""A pool of pinned host memory, which grows in the first step.

Memory is pinned in slabs, page by page, at about half a second per GiB; so slabs stay from step to
step, and are given back by `trim`, or by `shrink` once it is known that they are not needed. A room
may be given back while the device still reads it: whoever writes to the pool has the device wait
for `last_read` first.
"""

import mmap
import warnings
from collections import deque
from contextlib import suppress
from weakref import finalize

import torch
from torch import Tensor

from rekindle.offload.tiers.arena import Arena, Lease, aligned
from rekindle.offload.tiers.room import host_memory_left
from rekindle.sizes import format_bytes

_SLAB = 256 * 2**20
_FIRST_SLAB = 32 * 2**20


class Room:
    """Some bytes of the pool, taken by one copy."""

    __slots__ = ("_lease", "buffer", "read", "slab")

    def __init__(self, slab: "_Slab", lease: Lease) -> None:
        self.slab = slab
        self._lease = lease
        self.buffer = slab.memory[lease.start : lease.start + lease.nbytes]
        self.read: tuple[int, torch.cuda.Event] | None = None
        """The last read of these bytes: its number, in the order of reads, and when it is over."""


class PinnedPool:
    """Rooms in pinned memory, at most `max_bytes` in all."""

    def __init__(self, device: torch.device, max_bytes: int | None) -> None:
        self._device = device
        self.max_bytes = max_bytes
        self._slabs: list[_Slab] = []
        self._returned: deque[Room] = deque()
        self.last_read: tuple[int, torch.cuda.Event] | None = None
        """The last read of any room that was given back: a new write has to wait for it."""

    @property
    def size(self) -> int:
        return sum(slab.arena.size for slab in self._slabs)

    def reserve(self, nbytes: int) -> Room | None:
        """Returns room for `nbytes`; None if the cap is reached."""
        self._take_back()
        for slab in self._slabs:
            lease = slab.arena.lease(nbytes)
            if lease is not None:
                slab.is_used = True
                return Room(slab, lease)
        if not self._grow(aligned(nbytes)):
            return None
        slab = self._slabs[-1]
        lease = slab.arena.lease(nbytes)
        assert lease is not None, "a new slab holds what it was made for"
        return Room(slab, lease)

    def give_back(self, room: Room) -> None:
        """Free a room. Callable from any thread, at any moment."""
        self._returned.append(room)

    def watch_use(self) -> None:
        """Record from now on which slabs are used."""
        for slab in self._slabs:
            slab.is_used = False

    def shrink(self) -> None:
        """Unpin the slabs that were not used since `watch_use`."""
        self._drop([slab for slab in self._slabs if not slab.is_used])

    def trim(self) -> None:
        """Unpin the slabs that nobody uses."""
        self._take_back()
        self._drop([slab for slab in self._slabs if slab.arena.is_unused])

    def _drop(self, slabs: "list[_Slab]") -> None:
        if slabs:
            torch.cuda.synchronize(self._device)
            self._slabs = [slab for slab in self._slabs if slab not in slabs]

    def _take_back(self) -> None:
        while self._returned:
            read = self._returned[0].read
            if read and (self.last_read is None or read[0] > self.last_read[0]):
                self.last_read = read
            self._returned.popleft()  # with which its lease ends

    def _grow(self, nbytes: int) -> bool:
        """Add a slab of at least `nbytes`, a larger one if there is room for it."""
        wished = max(nbytes, min(_SLAB, max(_FIRST_SLAB, self.size)))
        for length in dict.fromkeys((wished, nbytes)):
            below_cap = self.max_bytes is None or self.size + length <= self.max_bytes
            if below_cap and length <= host_memory_left():
                self._slabs.append(_Slab(length, self._device))
                return True
        return False


class _Slab:
    """One stretch of pinned memory."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages are pinned faster, where there are any; a forked process has no use for them.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with suppress(AttributeError, OSError):
                memory.madvise(getattr(mmap, advice))
        self.memory = torch.frombuffer(memory, dtype=torch.uint8)
        self.arena = Arena(nbytes)
        self.is_used = True
        if pin(self.memory, device):
            finalize(self, unpin, self.memory, device).atexit = False


def pin(memory: Tensor, device: torch.device) -> bool:
    """Pin a stretch of memory; where that fails, warn and leave it: copies then take longer."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error) == 0:
        return True
    with suppress(RuntimeError):  # the next kernel reports the error that nobody took: this one
        torch.zeros(1, device=device)
    warnings.warn(
        f"rekindle.offload: {format_bytes(memory.numel())} of host memory could not be pinned "
        f"(CUDA error {int(error)}): activations go to ordinary memory, and training waits.",
        stacklevel=2,
    )
    return False


def unpin(memory: Tensor, device: torch.device) -> None:
    """Undo `pin`, when the device has done with the memory."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
