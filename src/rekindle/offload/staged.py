"""Disk as a tier for activations on a CUDA device: by way of a room in pinned memory.

An activation leaves the room as soon as it is written, and stays there if it cannot be written.
"""

from collections import deque
from concurrent.futures import Future, wait
from threading import RLock
from weakref import WeakMethod

import torch
from torch import Tensor

from rekindle.offload.host import HostTier, Incoming, Outgoing
from rekindle.offload.pinned import Room
from rekindle.offload.spill_file import SpillFile, succeeded, wait_for
from rekindle.offload.tiers import Copy, Mark, Tier

_STAGE = 4 * 2**30
"""Pinned memory for activations on their way to disk, if no cap is given."""


class StagedDiskTier(Tier):
    """Disk, for activations on a CUDA device: by way of pinned memory."""

    waits_on_device = True
    fetches_in_stages = True

    def __init__(self, device: torch.device, directory: str, max_bytes: int | None) -> None:
        self.host = HostTier(device, _STAGE if max_bytes is None else max_bytes)
        self.file = SpillFile(directory)
        self.lock = RLock()
        """Held while a room changes hands: the threads that write give theirs back."""
        self._writing: deque[Future[None]] = deque()

    def send(self, data: Tensor, saved_on: torch.cuda.Stream) -> "StagedCopy | None":
        while self._writing and self._writing[0].done():
            wait_for(self._writing.popleft())
        start = self.file.take(data.numel())
        room = self.host.pool.take(data.numel())
        while room is None and self._writing:  # until something else is written
            wait([self._writing.popleft()])
            room = self.host.pool.take(data.numel())
        if room is None:
            self.file.give_back(start, data.numel())
            return None
        copy = StagedCopy(self, room, start, data, saved_on)
        self._writing.append(copy.writing)
        return copy

    @property
    def pool_bytes(self) -> int:
        return self.file.size

    def trim(self) -> None:
        self.host.trim()
        self.file.trim()

    def place(self) -> torch.cuda.Stream:
        return self.host.place()

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
        "_nbytes",
        "_out",
        "_reading",
        "_room",
        "_start",
        "_tier",
        "writing",
    )

    def __init__(
        self,
        tier: StagedDiskTier,
        room: Room,
        start: int,
        data: Tensor,
        saved_on: torch.cuda.Stream,
    ) -> None:
        self._tier = tier
        self._room: Room | None = room
        self._start = start
        self._nbytes = data.numel()
        self._out = Outgoing(tier.host, room, data, saved_on)
        self._in: Incoming | None = None
        self._reading: Future[None] | None = None
        self.writing = tier.file.write(room.buffer, start, self._out.sent)
        written = WeakMethod(self._written)  # a future holds on to what it has called
        self.writing.add_done_callback(lambda f: (method := written()) and method(f))

    def _written(self, writing: "Future[None]") -> None:
        with self._tier.lock:
            if self._in is None and self._reading is None and succeeded(writing):
                self._leave_room()

    def is_out(self) -> bool:
        return self._out.is_out()

    def wait_out(self) -> None:
        self._out.wait_out()

    def fetch(self) -> bool:
        with self._tier.lock:
            if self._in is not None:
                return True
            if self._reading is None:
                if self._room is not None:  # not written yet
                    self._in = Incoming(self._tier.host, self._room, self._out.sent)
                    return True
                self._room = self._tier.host.pool.take(self._nbytes)
                if self._room is None:
                    return False
                read = self._tier.host.pool.last_read
                self._reading = self._tier.file.read(
                    self._room.buffer, self._start, read[1] if read else None
                )
            if self._reading.done():
                self._enter()
            return True

    def _enter(self) -> None:
        assert self._room is not None, "there is a room to read into"
        assert self._reading is not None, "fetch comes first"
        wait_for(self._reading)
        self._in = Incoming(self._tier.host, self._room, None)

    def take(self) -> Tensor:
        if self._in is None and self._reading is None and not self.fetch():
            return self._read_past_the_stage()
        if self._in is None:
            assert self._reading is not None, "it is being read, or has been"
            wait([self._reading])
            self._enter()
        assert self._in is not None, "it has entered"
        data = self._in.take()
        self.drop()
        return data

    def _read_past_the_stage(self) -> Tensor:
        """The bytes, by way of ordinary memory: others have all the pinned memory."""
        data = torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")
        wait_for(self._tier.file.read(data, self._start))
        return data.to(self._tier.host.device)

    def drop(self) -> None:
        with self._tier.lock:
            if self._in is not None:
                self._in.drop()
                self._in = None
            if self._reading is not None or succeeded(self.writing):
                self._leave_room()

    def _leave_room(self) -> None:
        """Give the room back, once no thread fills it."""
        room, reading = self._room, self._reading
        self._room = self._reading = None
        if room is not None and reading is not None:
            reading.cancel()
            reading.add_done_callback(lambda _: self._tier.host.pool.give_back(room))
        elif room is not None:
            self._tier.host.pool.give_back(room)

    def close(self) -> None:
        with self._tier.lock:
            reading = self._reading
            self.drop()
            room, self._room = self._room, None
        self._tier.file.give_back_after(self.writing, reading, self._start, self._nbytes)
        if room is not None:
            self.writing.add_done_callback(lambda _: self._tier.host.pool.give_back(room))
