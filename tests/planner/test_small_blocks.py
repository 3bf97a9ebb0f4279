"""Small blocks have few candidates, and the least budget is what it would be with all of them."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.planner import profile_model
from rekindle.planner.types import BlockProfile
from rekindle.strategy import SavedIndices, Selective

pytest.importorskip("scipy")

from rekindle.planner.solve.solver import least_peak


class Encoder(nn.Module):
    """Layers of torch's; the input of the first one needs no gradient, so it is distinct."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True)
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def profile_of(layers: int) -> rekindle.Profile:
    return rekindle.profile(Encoder(layers), torch.randn(2, 8, 32))


def kinds(block: BlockProfile) -> Counter[str]:
    """How many candidates go op by op, and how many recompute modules inside the block."""
    strategies = [candidate.strategy for candidate in block.candidates]
    return Counter(
        "op by op" if isinstance(each, Selective) else "modules"
        for each in strategies
        if isinstance(each, Selective) or (isinstance(each, SavedIndices) and each.modules)
    )


def test_a_first_layer_that_differs_has_few_candidates() -> None:
    first, other = profile_of(12).blocks
    assert kinds(first)["op by op"] <= 1
    assert not kinds(first)["modules"]
    assert kinds(other)["op by op"] > 1
    assert kinds(other)["modules"]


def test_a_block_that_saves_more_than_an_eighth_has_all_candidates() -> None:
    first, _ = profile_of(4).blocks
    assert kinds(first)["op by op"] > 1
    assert kinds(first)["modules"]


def test_the_least_budget_is_that_of_all_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    few = profile_of(12)
    monkeypatch.setattr(profile_model, "SMALL", 0.0)
    every = profile_of(12)
    assert len(few.blocks[0].candidates) < len(every.blocks[0].candidates)
    assert least_peak(few).prediction.peak == least_peak(every).prediction.peak
