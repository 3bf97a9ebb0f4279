"""Threads that read and write in the background, for all spill files of the process.

They are started when there is something to do, end when there is nothing more, and keep no process
from ending. `concurrent.futures` does neither; and Ctrl-C in the wrong moment of its Python leaves
a lock taken, on which everybody waits for ever. Here whatever the main thread does to a lock is
done in C, in a `with` statement, and so is undone whatever strikes.
"""

import atexit
import os
import time
from _thread import allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable
from weakref import ref

_WORKERS = 4
_SECONDS = 5.0
"""Seconds that the end of the process waits for what is being read or written."""


class Job:
    """A function to be called once, by a thread or by a caller that finds no thread."""

    __slots__ = (
        "__weakref__",
        "_guard",
        "_over",
        "_then",
        "_work",
        "error",
        "is_cancelled",
        "is_done",
    )

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        """The function to call; released, with all that it holds, before the job counts as done."""
        self._guard = allocate_lock()
        """A lock for the moment in which it is decided who does the job, or whether."""
        self._over = allocate_lock()
        """A lock that is held until the job is done."""
        self._over.acquire()
        self._then: list[Callable[[Job], None]] = []
        self.is_done = False
        self.is_cancelled = False
        self.error: BaseException | None = None

    @property
    def has_succeeded(self) -> bool:
        return self.is_done and not self.is_cancelled and self.error is None

    def run(self) -> None:
        """Do the job, unless somebody has begun to, or has cancelled it."""
        with self._guard:
            work, self._work = self._work, None
        if work is None:
            return
        error: BaseException | None = None
        try:
            work()
        except BaseException as caught:  # noqa: BLE001  (whoever waits for it is to know)
            error = caught.with_traceback(None)  # which would hold what the work holds
        del work
        self._end(error)
        if error is not None and not isinstance(error, Exception):
            raise error

    def cancel(self) -> bool:
        """Cancel the job; False if it has begun."""
        with self._guard:
            work = self._work
            if work is None:
                return False
            self._work = None
            self.is_cancelled = self.is_done = True
            self._over.release()
        self._call_back()
        return True

    def _end(self, error: BaseException | None) -> None:
        with self._guard:
            self.error = error
            self.is_done = True
        self._over.release()
        self._call_back()

    def wait(self) -> None:
        """Wait until the job is done, or cancelled."""
        with self._over:
            pass

    def when_done(self, then: Callable[["Job"], None]) -> None:
        """Call a function when the job is done, or now if it is."""
        with self._guard:
            self._then.append(then)
        if self.is_done:
            self._call_back()

    def _call_back(self) -> None:
        while True:
            with self._guard:
                if not self._then:
                    return
                then = self._then.pop(0)
            then(self)


class _Token:
    """A mark that a thread is alive: it holds one as long as it takes jobs."""

    __slots__ = ("__weakref__",)


class Workers:
    """Up to so many threads that do jobs in order, while there are any."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Have no threads: in a forked process there are none."""
        self._lock = allocate_lock()
        self._jobs: deque[Job] = deque()
        self._threads: dict[int, ref[_Token]] = {}

    @property
    def count(self) -> int:
        """Number of threads that there are now."""
        return sum(1 for token in list(self._threads.values()) if token() is not None)

    def submit(self, work: Callable[[], None]) -> Job:
        """Have something done in the background; or do it here, if there are no threads to be had.

        The thread is started first, and waits for the lock: so no job is ever left without one.
        """
        job, token = Job(work), _Token()
        try:
            with self._lock:
                if self.count < self._most:
                    self._threads[id(token)] = ref(token)
                    start_new_thread(self._take_jobs, (token,))
                self._jobs.append(job)
        except RuntimeError:  # no thread can be started: the interpreter ends, for one
            self._threads.pop(id(token), None)
            job.run()
        return job

    def _take_jobs(self, token: _Token) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    del self._threads[id(token)]
                    return
                job = self._jobs.popleft()
            job.run()
            del job  # else its error would live as long as there is nothing else to do

    def wait_until_idle(self, seconds: float = float("inf")) -> None:
        """Wait until all is done and the threads have ended, but no longer than that."""
        end = time.monotonic() + seconds
        while self.count and time.monotonic() < end:
            time.sleep(0.0005)

    def finish(self) -> None:
        """The process ends: begin nothing more, and let end what was begun."""
        with self._lock:
            self._jobs.clear()
        self.wait_until_idle(_SECONDS)


workers = Workers(_WORKERS)
os.register_at_fork(after_in_child=workers._begin_anew)
atexit.register(workers.finish)
