"""Set-up for every test: one thread, a fixed seed, gpu tests only where there is a GPU.

`scripts/test` runs the files of a whole run in as many processes as there are cores.
"""

import gc
import os
import time

# oneDNN picks bf16 kernels that some CPUs announce and cannot run; see scripts/_env.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rekindle.offload.owners import forget_unowned
from rekindle.offload.tiers.spill_file import SpillFile
from rekindle.planner.instruments import timing


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--programs",
        type=int,
        default=None,
        help="how many random programs tests/programs/test_random_programs.py draws",
    )


with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # How long an example takes, or to draw one, is up to whoever else uses the machine.
    settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any machine")

ROOT = Path(__file__).parent
MOST_WORKERS = 8
"""Each of them imports torch, transformers and lightning: 1 GiB."""
SELECTING = ("keyword", "markexpr", "lf", "stepwise")
"""Options of pytest by which a part of the tests runs."""
LONGEST = (
    "compile/test_offload_ops.py",
    "distributed/test_parallel.py",
    "planner/test_fake_profile.py",
    "offload/tiers/test_disk_and_processes.py",
    "compile/test_backends.py",
    "planner/test_solve.py",
    "planner/test_fit.py",
    "test_examples.py",
    "integrations/test_transformers.py",
    "integrations/test_transformers_trainer.py",
    "test_docs.py",
    "planner/ranks/test_fit_on_ranks.py",
    "offload/test_memory.py",
    "offload/test_programs_end_as_plain.py",
    "regions/recompute/test_ops_that_trace.py",
)
"""Files that take longest, which start first: no process is left alone with one at the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process for each core; none for a part of the tests, nor where they share a GPU's memory.

    Workers take longer to start than a few tests take to run.
    """
    has_paths = config.args_source is pytest.Config.ArgsSource.ARGS
    is_part = has_paths or any(config.getoption(name, None) for name in SELECTING)
    if is_part or torch.cuda.is_available():
        return 0
    return min(cores(), MOST_WORKERS)


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        rank = {name: i for i, name in enumerate(LONGEST)}
        items.sort(key=lambda item: rank.get(os.path.relpath(item.path, ROOT), len(rank)))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def few_tracked_objects() -> None:
    """Leave what other modules made out of `gc.collect()` and `gc.get_objects()`.

    With torch, its compiler and transformers, there are millions of objects: to look at all of them
    takes most of a second, and hundreds of tests do.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def no_time_while_others_run() -> Iterator[None]:
    """On a CPU, profiles measure the CPU time of this process: others may keep the cores busy."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(timing, "time", SimpleNamespace(perf_counter=time.process_time))
        yield


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def new_offloaders() -> None:
    """No context or policy outside a model has learnt of any step, or has memory set aside."""
    forget_unowned()


@pytest.fixture
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is away by the next line, so that backward needs it back and counts are exact.

    `monkeypatch.undo()` has it written in the background again.
    """
    write = SpillFile.write

    def write_now(self: SpillFile, *args: Any) -> Any:
        writing = write(self, *args)
        writing.wait()
        return writing

    monkeypatch.setattr(SpillFile, "write", write_now)
