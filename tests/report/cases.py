"""A profile with every kind of strategy, its plans, and an explanation, for tests of reports."""

from dataclasses import replace
from functools import cache

import pytest
import torch

import rekindle
from rekindle.planner.types import BlockProfile, Candidate, Profile
from rekindle.strategy import Keep, OpAddress, PlannedOps, Recompute, SavedIndices, Selective
from tests.explanation.models import gpt
from tests.planner.conftest import every_third

MIB = 2**20
GIB = 2**30

KEEP = Candidate(Keep(), 900 * MIB, 0, 0.010, 0.020, 1000 * MIB, 300 * MIB)
DROP = Candidate(Recompute(), 50 * MIB, 0, 0.010, 0.030, 1000 * MIB, 1200 * MIB)
MLP = Candidate(
    SavedIndices(recomputed=(2,), count=9, modules=("mlp.act",)),
    *(600 * MIB, 0, 0.010, 0.022, 1000 * MIB, 600 * MIB),
    recomputed_names=("mul",),
)
MOVE = Candidate(
    SavedIndices(offloaded=(0, 1), count=9),
    *(400 * MIB, 500 * MIB, 0.010, 0.020, 1000 * MIB, 300 * MIB),
    largest_moved=250 * MIB,
    offloaded_names=("mm", "mm"),
)
SPILL = replace(MOVE, strategy=SavedIndices(offloaded=(0, 1), tier="disk", count=9))
SOME = Candidate(
    Selective(PlannedOps(kept=(OpAddress("attn", "aten::mm", 0, 1),))),
    *(300 * MIB, 0, 0.011, 0.026, 1000 * MIB, 900 * MIB),
    kept_names=("mm",),
)


def profile_of(count: int = 8, device: str = "H100", model: str = "Toy") -> Profile:
    """A step of layers that are alike, and as large as those of a language model."""
    return Profile(
        model=model,
        device=device,
        batch="int64[4, 4096]",
        static_bytes=6 * GIB,
        before_bytes=32 * MIB,
        rest_peak=3 * GIB,
        rest_seconds=0.040,
        bytes_per_second=55e9,
        blocks=(BlockProfile("Layer", "Layer", (KEEP, DROP, MLP, MOVE, SOME)),),
        order=tuple((f"layers.{i}", 0) for i in range(count)),
        first_peak=40 * MIB,
        last_peak=200 * MIB,
        inputs=((4, 4096),),
        loss="given",
    )


def mixed_plan(count: int = 8) -> rekindle.Plan:
    """A plan whose blocks take turns with every kind of candidate."""
    kinds = [KEEP, DROP, MLP, MOVE, SOME, SPILL]
    plan = rekindle.solve(profile_of(count), "12GiB")
    blocks = [(f"layers.{i}", "Layer", kinds[i % len(kinds)]) for i in range(count)]
    return replace(plan, blocks=tuple(blocks))


@cache
def frontier() -> rekindle.Frontier:
    return rekindle.frontier(profile_of(), 8)


@cache
def explanation() -> rekindle.Explanation:
    torch.manual_seed(0)
    model, batch = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.MonkeyPatch.context() as patch:  # few candidates: nothing here is about them
        patch.setattr("rekindle.planner.keep_sets.keep_sets", lambda trace: every_third(trace)[:1])
        return rekindle.explain(model, batch, optimizer=optimizer, device="meta", like="H100")
