"""One nameless file, written and read by threads in the background.

The file has no name from its first moment, or loses it at once, so that the system frees it when
the process ends, however it ends. Room is reserved before anything is written (`posix_fallocate`),
so a full disk is found while the activation is still at hand.
"""

import ctypes
import errno
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Lock

import torch
from torch import Tensor

from rekindle.offload.arena import Arena

_WORKERS = 4
_PIECE = 64 * 2**20
"""What is read or written by one call: the system takes no more than 2 GiB at a time."""

_Work = Callable[[Tensor, int, torch.cuda.Event | None], None]


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
        return self._in_background(self._write, data, start, after)

    def read(
        self, data: Tensor, start: int, after: torch.cuda.Event | None = None
    ) -> "Future[None]":
        """Fill `data` in the background, once the device has come to an event."""
        return self._in_background(self._read, data, start, after)

    def _in_background(
        self, work: _Work, data: Tensor, start: int, after: torch.cuda.Event | None
    ) -> "Future[None]":
        """Have a thread do some work; or do it here, if there are no threads to be had."""
        if os.getpid() != self._process:
            raise OSError(errno.ECHILD, "the spill file belongs to the process that was forked")
        done: Future[None] = Future()
        box = [data]
        try:
            self._workers.submit(_do, work, box, start, after, done)
        except RuntimeError:  # the interpreter ends, for one; some thread may do it all the same
            _do(work, box, start, after, done)
        return done

    def give_back_after(
        self,
        writing: "Future[None]",
        reading: "Future[None] | None",
        start: int,
        nbytes: int,
    ) -> None:
        """Free some room as soon as no thread reads or writes there."""
        last = writing if reading is None or reading.cancel() else reading
        last.add_done_callback(lambda _: self.give_back(start, nbytes))

    def _write(self, data: Tensor, start: int, after: torch.cuda.Event | None) -> None:
        if after is not None:
            after.synchronize()
        with self.written.timing(data.numel()):
            for begin, piece in _pieces(data):
                done = 0
                while done < len(piece):
                    done += os.pwrite(self._fd, piece[done:], start + begin + done)

    def _read(self, data: Tensor, start: int, after: torch.cuda.Event | None) -> None:
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


def _do(
    work: _Work,
    box: list[Tensor],
    start: int,
    after: torch.cuda.Event | None,
    done: "Future[None]",
) -> None:
    """Do some work on what is in the box, unless somebody has; when it is done nobody holds it."""
    try:
        data = box.pop()
    except IndexError:
        return
    if not done.set_running_or_notify_cancel():
        return
    try:
        work(data, start, after)
    except BaseException as error:  # noqa: BLE001  (whoever waits for it is to know)
        done.set_exception(error.with_traceback(None))  # which leads back to `done`
    else:
        del data
        done.set_result(None)


def succeeded(future: "Future[None]") -> bool:
    """Whether it is done, and nothing went wrong."""
    return future.done() and not future.cancelled() and future.exception() is None


def wait_for(future: "Future[None]") -> None:
    """Wait until it is done. Raises an error of its own: the future's would hold all that waits."""
    try:
        error = future.exception()
    except CancelledError:  # nobody wants it any more
        return
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
