"""Fixtures of these tests."""

import pytest
import torch
from torch import Tensor


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 8, requires_grad=True)
