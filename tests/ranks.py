"""Ranks of real process groups: one process imports torch and forks all of them.

A test file runs a worker module once, with `results_of_worker`. The module's main is `run_worlds`:
it forks the ranks of each world, each of which runs every case and writes its results to a file.
"""

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
COLLECTIVE_SECONDS = 480
"""Seconds that a rank waits for the others: far longer than on a busy machine, and not for ever."""
WORKER_SECONDS = 900


Cases = Mapping[Any, Callable[[], Any]]
"""Functions that every rank of a world runs, one after the other, by name."""
Worlds = Mapping[int, Callable[[Path], Cases]]
"""The cases of each world, by its number of ranks; they are given a folder for files."""


class RankResults:
    """The results of every rank of each world, by case."""

    def __init__(self, folder: Path, worlds: Iterable[int]) -> None:
        self._ranks = {
            world: [_load(_results_file(folder, world, rank)) for rank in range(world)]
            for world in worlds
        }

    def of(self, case: Any, world: int = 2) -> list[Any]:
        """The results of all ranks, if none failed."""
        ranks = self._ranks[world]
        assert all(case in rank for rank in ranks), "a process died"
        for rank, found in enumerate(ranks):
            assert not _has_failed(found[case]), f"rank {rank}: {found[case]['failed']}"
        return [rank[case] for rank in ranks]


def _has_failed(result: Any) -> bool:
    return isinstance(result, dict) and "failed" in result


def results_of_worker(module: str, folder: Path, worlds: Iterable[int] = (2,)) -> RankResults:
    """Run a worker module to its end, and read the results of its ranks."""
    run_worker(module, folder)
    return RankResults(folder, worlds)


def _results_file(folder: Path, world: int, rank: int) -> Path:
    return folder / f"{world}-{rank}.pt"


def _load(path: Path) -> dict[Any, Any]:
    return torch.load(path) if path.exists() else {}


def run_worlds(worlds: Worlds, *, at_once: bool = False) -> int:
    """Run the cases of worlds, for the main of a worker module; the number of ranks that failed.

    The arguments of the command are a folder, and a part of the names of cases to run. With
    `at_once`, all worlds run at the same time: ranks wait for each other often.
    """
    folder, only = Path(sys.argv[1]), "".join(sys.argv[2:])
    groups = [
        [partial(_run_cases, rank, world, folder, cases, only) for rank in range(world)]
        for world, cases in worlds.items()
    ]
    return fork_ranks(chain(*groups)) if at_once else sum(map(fork_ranks, groups))


def _run_cases(
    rank: int, world: int, folder: Path, cases: Callable[[Path], Cases], only: str
) -> None:
    """Run the cases of a world on one rank, and write the results so far after each of them."""
    results: dict[Any, Any] = {}
    with process_group(rank, world, folder / f"rendezvous-{world}"):
        for name, case in cases(folder).items():
            if only not in str(name):
                continue
            try:
                results[name] = case()
            except Exception:  # noqa: BLE001 - the test of the case says so
                results[name] = {"failed": traceback.format_exc()}
            torch.save(results, _results_file(folder, world, rank))
            dist.barrier()


def local(tensor: Any) -> Any:
    """This rank's part of a tensor, if it is sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of this rank's parts of a model's gradients, by the parameter's name."""
    return {
        name: None if p.grad is None else local(p.grad).detach().clone()
        for name, p in model.named_parameters()
    }


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
