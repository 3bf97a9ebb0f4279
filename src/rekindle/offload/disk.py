"""Disk as a tier: one nameless file per device, written and read by threads in the background.

The file has no name from its first moment, or loses it at once, so that the system frees it when
the process ends, however it ends. Room is reserved before anything is written (`posix_fallocate`),
so a full disk is found while the activation is still at hand. An activation on a CUDA device goes
through a room in pinned memory, which it leaves as soon as it is written.
"""

import ctypes
import errno
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from threading import Lock, RLock
from weakref import WeakMethod

import torch
from torch import Tensor

from rekindle.offload.arena import Arena
from rekindle.offload.host import HostTier, Incoming, Outgoing
from rekindle.offload.pinned import Room
from rekindle.offload.tiers import Copy, Mark, Tier

_WORKERS = 4
_PIECE = 64 * 2**20
"""What is read or written by one call: the system takes no more than 2 GiB at a time."""
_STAGE = 4 * 2**30
"""Pinned memory for activations on their way to disk, if no cap is given."""


_Work = Callable[[list[Tensor], int, torch.cuda.Event | None], None]


class SpillFile:
    """Room on disk that nobody can see and that vanishes with the process."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._file: int | None = None
        self._process = os.getpid()
        self._arena = Arena(0)
        self._returned: deque[tuple[int, int]] = deque()
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="rekindle-spill")
        self.written = _Meter()
        self.read_back = _Meter()

    @property
    def size(self) -> int:
        return self._arena.size

    def take(self, nbytes: int) -> int:
        """The offset of `nbytes` of room. Raises `OSError` if the disk is full or unwritable."""
        while self._returned:
            self._arena.give_back(*self._returned.popleft())
        start = self._arena.take(nbytes)
        if start is None:
            if self._file is None:
                self._file = _open_nameless(self._directory)
            more = self._arena.missing(nbytes)
            _reserve(self._file, self._arena.size, more)
            self._arena.grow(more)
            start = self._arena.take(nbytes)
            assert start is not None, "the file has grown by what was missing"
        return start

    def give_back(self, start: int, nbytes: int) -> None:
        """Free some room; from any thread, at any moment."""
        self._returned.append((start, nbytes))

    def trim(self) -> None:
        """Give the disk back, if no room is in use."""
        while self._returned:
            self._arena.give_back(*self._returned.popleft())
        if self._file is not None and self._arena.is_unused:
            os.close(self._file)
            self._file = None
            self._arena = Arena(0)

    def write(
        self, data: Tensor, start: int, after: torch.cuda.Event | None = None
    ) -> "Future[None]":
        """Write bytes in the background, once the device has come to an event."""
        return self._in_background(self._write, [data], start, after)

    def read(
        self, data: Tensor, start: int, after: torch.cuda.Event | None = None
    ) -> "Future[None]":
        """Fill `data` in the background, once the device has come to an event."""
        return self._in_background(self._read, [data], start, after)

    def _in_background(
        self, work: _Work, data: list[Tensor], start: int, after: torch.cuda.Event | None
    ) -> "Future[None]":
        """Have a thread do some work; it empties the list, so that nothing else holds the data."""
        if os.getpid() != self._process:
            raise OSError(errno.ECHILD, "the spill file belongs to the process that was forked")
        try:
            return self._workers.submit(work, data, start, after)
        except RuntimeError:  # there are no threads to be had: the interpreter ends, for one
            done: Future[None] = Future()
            try:
                work(data, start, after)
            except OSError as error:
                done.set_exception(error)
            else:
                done.set_result(None)
            return done

    def give_back_after(
        self,
        writing: "Future[None]",
        reading: "Future[None] | None",
        start: int,
        nbytes: int,
    ) -> None:
        """Free some room as soon as no thread reads or writes there."""
        writing.cancel()
        last = writing if reading is None or reading.cancel() else reading
        last.add_done_callback(lambda _: self.give_back(start, nbytes))

    def _write(self, box: list[Tensor], start: int, after: torch.cuda.Event | None) -> None:
        data = box.pop()
        if after is not None:
            after.synchronize()
        with self.written.timing(data.numel()):
            for begin, piece in _pieces(data):
                done = 0
                while done < len(piece):
                    done += os.pwrite(self._fd, piece[done:], start + begin + done)

    def _read(self, box: list[Tensor], start: int, after: torch.cuda.Event | None) -> None:
        data = box.pop()
        if after is not None:
            after.synchronize()
        with self.read_back.timing(data.numel()):
            for begin, piece in _pieces(data):
                done = 0
                while done < len(piece):
                    count = os.preadv(self._fd, [piece[done:]], start + begin + done)
                    if not count:
                        raise OSError(errno.EIO, "the spill file ends too early")
                    done += count

    @property
    def _fd(self) -> int:
        assert self._file is not None, "room was taken in it"
        return self._file

    def __del__(self) -> None:
        self._workers.shutdown(wait=False)
        if self._file is not None:
            os.close(self._file)


class DiskTier(Tier):
    """Disk, for activations in host memory."""

    waits_on_device = False

    def __init__(self, directory: str) -> None:
        self.file = SpillFile(directory)

    def send(self, data: Tensor) -> "DiskCopy | None":
        return DiskCopy(self.file, data)

    @property
    def pool_bytes(self) -> int:
        return self.file.size

    def trim(self) -> None:
        self.file.trim()

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, begin: Mark, end: Mark) -> float:
        return float(end - begin)

    def rates(self) -> tuple[float, float]:
        return self.file.written.rate, self.file.read_back.rate


class DiskCopy(Copy):
    """One activation of host memory on disk."""

    __slots__ = ("_coming", "_file", "_nbytes", "_reading", "_start", "_writing")

    def __init__(self, file: SpillFile, data: Tensor) -> None:
        self._file = file
        self._nbytes = data.numel()
        self._start = file.take(self._nbytes)
        self._writing = file.write(data, self._start)
        self._coming: Tensor | None = None
        self._reading: Future[None] | None = None

    def is_out(self) -> bool:
        return self._writing.done()

    def when_out(self, let_go: Callable[[], None]) -> None:
        def written(writing: "Future[None]") -> None:
            if _succeeded(writing):
                let_go()

        self._writing.add_done_callback(written)

    def check_out(self) -> None:
        _wait_for(self._writing)

    def wait_out(self) -> None:
        _wait_for(self._writing)

    def fetch(self) -> bool:
        if self._coming is None:
            data = torch.empty(self._nbytes, dtype=torch.uint8, device="cpu")
            self._reading = self._file.read(data, self._start)
            self._coming = data
        return True

    def take(self) -> Tensor:
        self.fetch()
        data, reading = self._coming, self._reading
        assert data is not None, "it is being read, or has been"
        assert reading is not None, "it is being read, or has been"
        self._coming = None
        _wait_for(reading)
        return data

    def drop(self) -> None:
        self._coming = None  # a thread that still reads it has its own reference

    def close(self) -> None:
        self.drop()
        self._file.give_back_after(self._writing, self._reading, self._start, self._nbytes)


class StagedDiskTier(Tier):
    """Disk, for activations on a CUDA device: by way of pinned memory."""

    waits_on_device = True

    def __init__(self, device: torch.device, directory: str, max_bytes: int | None) -> None:
        self.host = HostTier(device, _STAGE if max_bytes is None else max_bytes)
        self.file = SpillFile(directory)
        self.lock = RLock()
        """Held while a room changes hands: the threads that write give theirs back."""
        self._writing: deque[Future[None]] = deque()

    def send(self, data: Tensor) -> "StagedCopy | None":
        start = self.file.take(data.numel())
        room = self.host.pool.take(data.numel())
        while room is None and self._writing:  # until something else is written
            wait([self._writing.popleft()])
            room = self.host.pool.take(data.numel())
        if room is None:
            self.file.give_back(start, data.numel())
            return None
        copy = StagedCopy(self, room, start, data)
        self._writing.append(copy.writing)
        return copy

    @property
    def pool_bytes(self) -> int:
        return self.file.size

    def trim(self) -> None:
        self.host.trim()
        self.file.trim()

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

    def __init__(self, tier: StagedDiskTier, room: Room, start: int, data: Tensor) -> None:
        self._tier = tier
        self._room: Room | None = room
        self._start = start
        self._nbytes = data.numel()
        self._out = Outgoing(tier.host, room, data)
        self._in: Incoming | None = None
        self._reading: Future[None] | None = None
        self.writing = tier.file.write(room.buffer, start, self._out.sent)
        written = WeakMethod(self._written)  # a future holds on to what it has called
        self.writing.add_done_callback(lambda f: (method := written()) and method(f))

    def _written(self, writing: "Future[None]") -> None:
        with self._tier.lock:
            if self._in is None and self._reading is None and _succeeded(writing):
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
        _wait_for(self._reading)
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
        _wait_for(self._tier.file.read(data, self._start))
        return data.to(self._tier.host.device)

    def drop(self) -> None:
        with self._tier.lock:
            if self._in is not None:
                self._in.drop()
                self._in = None
            if self._reading is not None or _succeeded(self.writing):
                self._leave_room()

    def _leave_room(self) -> None:
        """Give the room back, once no thread fills it."""
        room, reading = self._room, self._reading
        self._room = self._reading = None
        if room is not None and reading is not None:
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


def _succeeded(future: "Future[None]") -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _wait_for(future: "Future[None]") -> None:
    """Wait until it is done. Raises an error of its own: the future's would hold all that waits."""
    error = None if future.cancelled() else future.exception()
    if error is not None:
        raise OSError(getattr(error, "errno", None) or errno.EIO, _message(error))


def _message(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _reserve(file: int, start: int, nbytes: int) -> None:
    """Have the system set disk aside. Raises `OSError` if there is not enough."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, start, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
        else:
            return
    os.ftruncate(file, start + nbytes)  # whether there is enough shows when it is written


def _open_nameless(directory: str) -> int:
    """A file that no folder lists: the system frees it with its last user."""
    with suppress(AttributeError, OSError):  # no such thing on every system and file system
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    file, name = tempfile.mkstemp(prefix="rekindle-", dir=directory)
    os.unlink(name)
    return file


def _pieces(data: Tensor) -> Iterator[tuple[int, memoryview]]:
    """The memory of a tensor of bytes, in pieces, each with its offset."""
    whole = memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())).cast("B")
    for begin in range(0, len(whole), _PIECE):
        yield begin, whole[begin : begin + _PIECE]


class _Meter:
    """Bytes per second of work that several threads do at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running = 0
        self._since = 0.0
        self._busy = 0.0
        self._bytes = 0

    @property
    def rate(self) -> float:
        return self._bytes / self._busy if self._busy else 0.0

    @contextmanager
    def timing(self, nbytes: int) -> Iterator[None]:
        with self._lock:
            if not self._running:
                self._since = time.perf_counter()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._bytes += nbytes
                if not self._running:
                    self._busy += time.perf_counter() - self._since
