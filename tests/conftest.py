"""Set-up for every test: one thread, a fixed seed, gpu tests only where there is a GPU."""

import os

# oneDNN picks bf16 kernels that some CPUs announce and cannot run; see scripts/_env.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

from typing import Any

import pytest
import torch

from rekindle.offload.context import _engines
from rekindle.offload.spill_file import SpillFile


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--programs",
        type=int,
        default=None,
        help="how many random programs tests/test_random_programs.py draws",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def new_engines() -> None:
    """Nothing was learnt of any step, and no room is set aside."""
    _engines.clear()


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
