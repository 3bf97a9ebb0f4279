"""The disk tier for activations in host memory."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from rekindle.offload.tiers.base import Copy, Mark, Stream, Tier
from rekindle.offload.tiers.spill_file import SpillFile, wait_for
from rekindle.offload.tiers.workers import Job


class DiskTier(Tier):
    """Disk, for activations in host memory."""

    waits_on_device = False

    def __init__(self, directory: str) -> None:
        self.file = SpillFile(directory)

    def begin_copy_out(self, data: Tensor, saved_on: Stream) -> "DiskCopy | None":  # noqa: ARG002
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

    __slots__ = ("_coming", "_file", "_lease", "_reading", "_writing")

    def __init__(self, file: SpillFile, data: Tensor) -> None:
        self._file = file
        self._coming: Tensor | None = None
        self._reading: Job | None = None
        self._lease = file.lease(data.numel())
        self._writing = file.write(data, self._lease)

    def is_out(self) -> bool:
        return self._writing.is_done

    def when_out(self, let_go: Callable[[], None]) -> None:
        def written(writing: Job) -> None:
            if writing.has_succeeded:
                let_go()

        self._writing.when_done(written)

    def check_out(self) -> None:
        wait_for(self._writing)

    def wait_out(self) -> None:
        wait_for(self._writing)

    def begin_return(self) -> bool:
        if self._coming is None:
            data = torch.empty(self._lease.nbytes, dtype=torch.uint8, device="cpu")
            reading = self._file.read(data, self._lease)
            self._reading = reading
            self._coming = data
        return True

    def finish_return(self) -> Tensor:
        self.begin_return()
        data, reading = self._coming, self._reading
        assert data is not None, "it is being read, or has been"
        assert reading is not None, "it is being read, or has been"
        try:
            wait_for(reading)
        except OSError:
            self._coming = None
            raise
        self._coming = None
        return data

    def drop(self) -> None:
        self._coming = None  # a thread that still reads it has its own reference

    def close(self) -> None:
        self.drop()
        self._writing.cancel()
        if self._reading is not None:
            self._reading.cancel()
