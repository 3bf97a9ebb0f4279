"""Explanations of steps that run on a GPU."""

from typing import Any

import pytest
import torch

import rekindle
from tests.explanation.models import dropped
from tests.planner.cases import unchanged

pytestmark = pytest.mark.gpu


def test_a_step_on_a_gpu_is_recorded_there_and_its_bytes_add_up() -> None:
    model, batch = dropped()
    model, batch = model.cuda(), batch.cuda()
    with unchanged(model):
        found = rekindle.explain(model, batch)
    assert found.source == "device"
    assert found.device_bytes == torch.cuda.get_device_properties(0).total_memory
    assert list(found.inconsistencies()) == []
    assert found.kinds[found.kind_names.index("activations")].at_peak > 0


def test_copies_in_host_memory_are_not_counted() -> None:
    class OnHost(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autograd.graph.save_on_cpu():
                return self.linear(x).exp().exp().sum()

    x = torch.randn(256, 64, device="cuda")
    found = rekindle.explain(OnHost().cuda(), x)
    assert found.kinds[found.kind_names.index("activations")].highest == 4  # the loss
