"""Ranks of real process groups: one process imports torch and forks all of them.

A test file runs a worker module once, with `run_worker`; the module forks its ranks with
`fork_ranks`, each rank runs every case inside `process_group` and leaves its results in a file.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
COLLECTIVE_SECONDS = 120
"""How long a rank waits for the others: far longer than on a busy machine, and not for ever."""
WORKER_SECONDS = 900


def run_worker(module: str, folder: Path) -> None:
    """Run `python -m module folder` to its end; its complaints are the error if it fails."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WORKER_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def fork_ranks(ranks: Iterable[Callable[[], None]]) -> int:
    """Run each in a process of its own, all at the same time; the number of those that failed."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=rank) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(process.exitcode != 0 for process in processes)


@contextmanager
def process_group(rank: int, world: int, rendezvous: Path) -> Iterator[None]:
    """A rank's part of a group of `world` ranks that meet by a file."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    try:
        yield
    finally:
        leave_process_group()


@contextmanager
def one_rank() -> Iterator[None]:
    """This process is a group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        leave_process_group()


def leave_process_group() -> None:
    """Leave the process group, and never let it die.

    A thread of gloo's lets go of a collective a moment after its end, and needs Python's lock for
    that. A group that dies in this moment waits for the thread with the lock held, for ever.
    """
    _left.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()


_left: list[Any] = []
