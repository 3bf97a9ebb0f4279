"""Fixtures of tests of regions under policies."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from rekindle import policies
from rekindle.policies import Policy
from rekindle.regions.selective.op_graph import RecordedOp
from tests.regions.selective.toy_regions import DECISIONS, POLICIES


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """How often each op is run again."""
    again, ran = RecordedOp.rerun, Counter[Any]()

    def counted(self: RecordedOp, *args: Any) -> None:
        ran[self.traits.func] += 1
        again(self, *args)

    monkeypatch.setattr(RecordedOp, "rerun", counted)
    return ran


@pytest.fixture(params=DECISIONS.values(), ids=DECISIONS.keys())
def decision(request: pytest.FixtureRequest) -> Policy:
    return request.param


@pytest.fixture(params=POLICIES.values(), ids=POLICIES.keys())
def policy(request: pytest.FixtureRequest) -> policies.Policy:
    return request.param


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, 6, requires_grad=True)


@pytest.fixture
def q() -> Tensor:
    return torch.randn(1, 4, 16, 4, requires_grad=True)
