"""Set-up for every test: one thread, a fixed seed, gpu tests only where there is a GPU."""

import os

# oneDNN picks bf16 kernels that some CPUs announce and cannot run; see scripts/_env.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch


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
