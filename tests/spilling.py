"""Helpers for tests of the disk tier: a chain of activations, its offloader, programs."""

import errno
import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.offload.activation import Activation
from rekindle.offload.device_offloader import DeviceOffloader
from rekindle.offload.owners import shared_offloader
from rekindle.offload.step_activations import StepActivations
from rekindle.offload.tiers.disk import DiskTier
from rekindle.offload.tiers.spill_file import SpillFile
from rekindle.offload.tiers.workers import workers

PAGE = 4096
"""The size of every activation of `chain`: 1024 numbers."""
DEPTH = 8
SENT = DEPTH - 2
"""Of these so many go: the last two, which backward wants first, stay."""
SECONDS = 300
"""Longer than anything here takes; whoever waits that long fails."""


def chain(x: Tensor, depth: int = DEPTH) -> Tensor:
    """A scalar from `x`; autograd holds `depth` activations of its size, none of them `x`."""
    hidden = x * 2
    for _ in range(depth):
        hidden = hidden.sin()
    return hidden.sum()


def leaf(numbers: int = PAGE // 4) -> Tensor:
    return torch.randn(numbers, requires_grad=True)


def plain_gradient(x: Tensor, depth: int = DEPTH) -> Tensor:
    (found,) = torch.autograd.grad(chain(x, depth), x)
    return found


@dataclass
class Spill:
    """One directory, a context that offloads to it, and the offloader behind that."""

    directory: Path
    offload: rekindle.Offload

    def forward(self, x: Tensor, depth: int = DEPTH) -> Tensor:
        with self.offload:
            return chain(x, depth)

    def gradient(self, x: Tensor, depth: int = DEPTH) -> Tensor:
        (found,) = torch.autograd.grad(self.forward(x, depth), x)
        return found

    @property
    def offloader(self) -> DeviceOffloader:
        offloader = shared_offloader(self.offload.strategy).by_device[torch.device("cpu")]
        assert offloader is not None
        return offloader

    @property
    def step(self) -> StepActivations:
        assert self.offloader._step is not None, "nothing was saved yet"
        return self.offloader._step

    @property
    def activations(self) -> list[Activation]:
        """Those of the last step that are alive."""
        return [a for a in (weak() for weak in self.step.activations) if a is not None]

    @property
    def file(self) -> SpillFile:
        tier = self.offloader.tier
        assert isinstance(tier, DiskTier)
        return tier.file

    @property
    def fd(self) -> int:
        assert self.file._file is not None, "no file is open"
        return self.file._file

    def settle(self) -> None:
        """Until no thread reads or writes: each of them has come to the end of its work."""
        workers.wait_until_idle(SECONDS)
        assert workers.count == 0

    def gives_all_room_back(self) -> bool:
        """Whether no room in the file, and there was some, is in use any more."""
        had_room = self.file.size > 0
        self.settle()
        self.offload.trim()
        return had_room and self.file.size == 0


def spill_to(directory: Path, **options: Any) -> Spill:
    options = {"quota": 1.0, "min_bytes": 1, **options}
    return Spill(directory, rekindle.offload(tier="disk", directory=directory, **options))


def fails(
    patch: pytest.MonkeyPatch, call: str, error: int, passes: Callable[[int], bool]
) -> Callable[[], int]:
    """Have a call of `os` fail in the tier, unless the n-th of its calls passes; counts them."""
    real, calls = getattr(os, call), []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if passes(len(calls) - 1):
            return real(*args)
        raise OSError(error, os.strerror(error))

    patch.setattr(os, call, failing)
    return lambda: len(calls)


class Gate:
    """Holds up a call of `os` in every thread until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, call: str) -> None:
        real = getattr(os, call)
        self.reached = Event()
        self._opened = Event()

        def held_up(*args: Any) -> Any:
            self.reached.set()
            assert self._opened.wait(SECONDS), "nobody opened the gate"
            return real(*args)

        patch.setattr(os, call, held_up)

    def open(self) -> None:
        self._opened.set()


def no_tmpfile(patch: pytest.MonkeyPatch) -> None:
    """As on a file system, such as NFS, that has no nameless files."""
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *args, **kwargs)

    patch.setattr(os, "open", refusing)


def count(*kinds: type) -> tuple[int, ...]:
    """How many objects there are of each type."""
    found = Counter(map(type, gc.get_objects()))
    return tuple(found[kind] for kind in kinds)


# Programs of their own

_PRELUDE = """
import os, signal, sys, threading, warnings
from pathlib import Path
import torch
from pytest import MonkeyPatch
import rekindle
from tests.spilling import *
torch.set_num_threads(1)
torch.manual_seed(0)
spill, x = spill_to(Path(sys.argv[1])), leaf()

def stop(*_):
    os.write(1, b"ready" + os.linesep.encode())  # at once, whichever threads come here
    sys.stdin.readline()
"""


def program(text: str, directory: Path) -> "subprocess.Popen[str]":
    """Start a program; it has `spill`, `x`, and `stop()`, which waits to be told to go on."""
    root = Path(__file__).parents[1]
    paths = [str(root), str(root / "src"), *filter(None, sys.path)]
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", _PRELUDE + dedent(text), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def outcome(text: str, directory: Path) -> tuple[int, str, str]:
    """Run a program to its end: its exit status, what it printed, and its complaints."""
    with program(text, directory) as running:
        try:
            out, err = running.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            running.communicate()
            raise
    return running.returncode, out.strip(), err.strip()


def open_files(pid: int, directory: Path) -> list[os.stat_result]:
    """The files below a directory that a process has open."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            found += [entry.stat()] * os.readlink(entry).startswith(f"{directory}/")
    return found
