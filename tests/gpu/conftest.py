"""Fixtures for tests on a GPU."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rekindle.offload.owners import forget_unowned


@pytest.fixture
def own_offloaders() -> Iterator[None]:
    """The test begins with offloaders that have learnt nothing, and leaves none behind."""
    forget_unowned()
    yield
    forget_unowned()
    gc.collect()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(64, 64, device="cuda", requires_grad=True)
