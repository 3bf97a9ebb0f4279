"""The spill file: without a name, written and read by threads in the background.

The file has no name from its first moment, or loses it at once, so that the system frees it when
the process ends, however it ends. Room is reserved before anything is written (`posix_fallocate`),
so a full disk is found while the activation is still at hand.
"""

import ctypes
import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from rekindle.offload.tiers.arena import Arena, Lease
from rekindle.offload.tiers.workers import Job, workers

_PIECE = 64 * 2**20
"""Bytes that one call reads or writes: the system takes no more than 2 GiB at a time."""


class SpillFile:
    """A file that no folder lists and that vanishes with the process."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._file: int | None = None
        self._process = os.getpid()
        self._arena = Arena(0)
        self.written = _Meter()
        self.read_back = _Meter()

    @property
    def size(self) -> int:
        return self._arena.size

    def lease(self, nbytes: int) -> Lease:
        """Lease `nbytes` of the file. Raises `OSError` if the disk is full or unwritable."""
        lease = self._arena.lease(nbytes)
        if lease is None:
            if self._file is None:
                self._run(self._open)
            more = self._arena.missing(nbytes)
            _reserve(self._fd, self._arena.size, more)
            self._arena.grow(more)
            lease = self._arena.lease(nbytes)
            assert lease is not None, "the file has grown by what was missing"
        return lease

    def trim(self) -> None:
        """Give the disk back, if no room is in use."""
        if self._file is not None and self._arena.is_unused:
            self._run(self._close)
            self._arena = Arena(0)

    def write(self, data: Tensor, lease: Lease, after: torch.cuda.Event | None = None) -> Job:
        """Write bytes in the background, once the device has come to an event."""
        return self._in_background(partial(self._write, data, lease, after))

    def read(self, data: Tensor, lease: Lease, after: torch.cuda.Event | None = None) -> Job:
        """Fill `data` in the background, once the device has come to an event."""
        return self._in_background(partial(self._read, data, lease, after))

    def _in_background(self, work: Callable[[], None]) -> Job:
        if os.getpid() != self._process:
            raise OSError(errno.ECHILD, "the spill file belongs to the process that was forked")
        return workers.submit(work)

    def _run(self, work: Callable[[], None]) -> None:
        """Have a thread do something that Ctrl-C would leave half done, and wait for it."""
        wait_for(self._in_background(work))

    def _open(self) -> None:
        if self._file is None:
            self._file = _open_nameless(self._directory)

    def _close(self) -> None:
        """Give the disk back, also if a forked process still has the file open."""
        file, self._file = self._file, None
        if file is None:
            return
        if os.getpid() == self._process:
            with suppress(OSError):
                os.ftruncate(file, 0)
        os.close(file)

    def _write(self, data: Tensor, lease: Lease, after: torch.cuda.Event | None) -> None:
        if after is not None:
            after.synchronize()
        with self.written.timing(data.numel()):
            for begin, piece in _pieces(data):
                done = 0
                while done < len(piece):
                    done += os.pwrite(self._fd, piece[done:], lease.start + begin + done)

    def _read(self, data: Tensor, lease: Lease, after: torch.cuda.Event | None) -> None:
        if after is not None:
            after.synchronize()
        with self.read_back.timing(data.numel()):
            for begin, piece in _pieces(data):
                done = 0
                while done < len(piece):
                    count = os.preadv(self._fd, [piece[done:]], lease.start + begin + done)
                    if not count:
                        raise OSError(errno.EIO, "the spill file ends too early")
                    done += count

    @property
    def _fd(self) -> int:
        assert self._file is not None, "room was taken in it"
        return self._file

    def __del__(self) -> None:
        self._close()


def wait_for(job: Job) -> None:
    """Wait for a job. Raises a new `OSError` if it failed: the job's would hold all that waits."""
    job.wait()
    error = job.error
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
    """Open a file that no folder lists: the system frees it with its last user."""
    with suppress(AttributeError, OSError):  # no such thing on every system and file system
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    file, name = tempfile.mkstemp(prefix="rekindle-", dir=directory)
    os.unlink(name)
    return file


def _pieces(data: Tensor) -> Iterator[tuple[int, memoryview]]:
    """Yields the memory of a tensor of bytes in pieces, each with its offset."""
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
