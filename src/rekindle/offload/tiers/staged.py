"""The disk tier for activations on a CUDA device: by way of a room in pinned memory.

An activation leaves the room as soon as it is written, and stays there if it cannot be written.
"""

from collections import deque
from threading import RLock
from weakref import WeakMethod

import torch
from torch import Tensor

from rekindle.offload.tiers.arena import Lease
from rekindle.offload.tiers.base import Copy, Mark, Tier
from rekindle.offload.tiers.host import HostTier, Incoming, Outgoing
from rekindle.offload.tiers.pinned import Room
from rekindle.offload.tiers.spill_file import SpillFile, wait_for
from rekindle.offload.tiers.workers import Job

_STAGE = 4 * 2**30
"""Pinned memory for activations on their way to disk, if no cap is given."""


class StagedDiskTier(Tier):
    """Disk, for activations on a CUDA device: by way of pinned memory."""

    waits_on_device = True
    returns_in_stages = True

    def __init__(self, device: torch.device, directory: str, max_bytes: int | None) -> None:
        self.host = HostTier(device, _STAGE if max_bytes is None else max_bytes)
        self.file = SpillFile(directory)
        self.lock = RLock()
        """A lock for rooms that change hands: the threads that write give theirs back."""
        self._writing: deque[Job] = deque()

    def begin_copy_out(self, data: Tensor, saved_on: torch.cuda.Stream) -> "StagedCopy | None":
        while self._writing and self._writing[0].is_done:
            wait_for(self._writing.popleft())
        lease = self.file.lease(data.numel())
        room = self.host.pool.reserve(data.numel())
        while room is None and self._writing:  # until something else is written
            self._writing[0].wait()
            self._writing.popleft()
            room = self.host.pool.reserve(data.numel())
        if room is None:
            return None
        copy = StagedCopy(self, room, lease, data, saved_on)
        self._writing.append(copy.writing)
        return copy

    @property
    def pool_bytes(self) -> int:
        return self.file.size

    def trim(self) -> None:
        self.host.trim()
        self.file.trim()

    def current_stream(self) -> torch.cuda.Stream:
        return self.host.current_stream()

    def join(self, data: Tensor, made_at: torch.cuda.Stream) -> None:
        self.host.join(data, made_at)

    def growth(self) -> int:
        return self.file.size + self.host.growth()

    def mark(self) -> Mark:
        return self.host.mark()

    def seconds(self, begin: Mark, end: Mark) -> float:
        return self.host.seconds(begin, end)

    def rates(self) -> tuple[float, float]:
        return self.file.written.rate, self.file.read_back.rate


class StagedCopy(Copy):
    """One activation of a CUDA device on disk.

    Until it is written it is in its pinned room, and there it stays if it cannot be written.
    """

    __slots__ = (
        "__weakref__",
        "_in",
        "_lease",
        "_out",
        "_reading",
        "_room",
        "_tier",
        "writing",
    )

    def __init__(
        self,
        tier: StagedDiskTier,
        room: Room,
        lease: Lease,
        data: Tensor,
        saved_on: torch.cuda.Stream,
    ) -> None:
        self._tier = tier
        self._room: Room | None = room
        self._lease = lease
        self._out = Outgoing(tier.host, room, data, saved_on)
        self._in: Incoming | None = None
        self._reading: Job | None = None
        self.writing = tier.file.write(room.buffer, lease, self._out.sent)
        written = WeakMethod(self._written)  # else it would live until it is written
        self.writing.when_done(lambda job: (method := written()) and method(job))

    def _written(self, writing: Job) -> None:
        with self._tier.lock:
            if self._in is None and self._reading is None and writing.has_succeeded:
                self._leave_room()

    def is_out(self) -> bool:
        return self._out.is_out()

    def wait_out(self) -> None:
        self._out.wait_out()

    def begin_return(self) -> bool:
        with self._tier.lock:
            if self._in is not None:
                return True
            if self._reading is None:
                if self._room is not None:  # not written yet
                    self._in = Incoming(self._tier.host, self._room, self._out.sent)
                    return True
                self._room = self._tier.host.pool.reserve(self._lease.nbytes)
                if self._room is None:
                    return False
                read = self._tier.host.pool.last_read
                self._reading = self._tier.file.read(
                    self._room.buffer, self._lease, read[1] if read else None
                )
            if self._reading.is_done:
                self._enter()
            return True

    def _enter(self) -> None:
        assert self._room is not None, "there is a room to read into"
        assert self._reading is not None, "begin_return comes first"
        wait_for(self._reading)
        self._in = Incoming(self._tier.host, self._room, None)

    def finish_return(self) -> Tensor:
        if self._in is None and self._reading is None and not self.begin_return():
            return self._read_past_the_stage()
        if self._in is None:
            assert self._reading is not None, "it is being read, or has been"
            self._reading.wait()
            self._enter()
        assert self._in is not None, "it has entered"
        data = self._in.finish_return()
        self.drop()
        return data

    def _read_past_the_stage(self) -> Tensor:
        """Returns the bytes by way of ordinary memory: others have all the pinned memory."""
        data = torch.empty(self._lease.nbytes, dtype=torch.uint8, device="cpu")
        wait_for(self._tier.file.read(data, self._lease))
        return data.to(self._tier.host.device)

    def drop(self) -> None:
        with self._tier.lock:
            if self._in is not None:
                self._in.drop()
                self._in = None
            if self._reading is not None or self.writing.has_succeeded:
                self._leave_room()

    def _leave_room(self) -> None:
        """Give the room back, once no thread fills it."""
        room, reading = self._room, self._reading
        self._room = self._reading = None
        if room is not None and reading is not None:
            reading.cancel()
            reading.when_done(lambda _: self._tier.host.pool.give_back(room))
        elif room is not None:
            self._tier.host.pool.give_back(room)

    def close(self) -> None:
        with self._tier.lock:
            self.drop()
            room, self._room = self._room, None
        if room is not None:
            self.writing.when_done(lambda _: self._tier.host.pool.give_back(room))
