"""The ways to write a strategy, and the strategies that they mean."""

from typing import Any

import pytest
import torch

import rekindle
from rekindle import policies
from rekindle.modules.strategy_engines import offload_context
from rekindle.modules.strategy_spelling import strategy_of
from rekindle.strategy import (
    Keep,
    NumberedOps,
    Offload,
    PlannedOps,
    Recompute,
    SavedIndices,
    Selective,
    Strategy,
    Tile,
)
from tests.toys import Stack


@pytest.mark.parametrize(
    ("spelling", "strategy"),
    [
        ("keep", Keep()),
        ("recompute", Recompute()),
        ("offload", Offload(quota=1.0)),
        ("spill", Offload(tier="disk", quota=1.0)),
        (policies.keep_matmuls, Selective(policies.keep_matmuls)),
        (PlannedOps(), Selective(PlannedOps())),
        (rekindle.offload(), Offload(min_bytes=2**20)),
        (
            rekindle.offload(quota=0.5, min_bytes=3, derive=False),
            Offload("host", 0.5, 3, derive=False),
        ),
        (Tile(2), Tile(2)),
    ],
    ids=repr,
)
def test_a_spelling_means_a_strategy(spelling: Any, strategy: Strategy) -> None:
    assert strategy_of(spelling) == strategy


@pytest.mark.parametrize(
    "given",
    [
        rekindle.offload(),
        rekindle.offload(quota=1.0),
        rekindle.offload(quota=1, min_bytes=1),
        rekindle.offload(tier="disk", quota="1GiB", max_host_bytes="1GiB", on_full="raise"),
    ],
    ids=repr,
)
def test_offload_with_options_is_the_same_after_it_was_a_strategy(given: rekindle.Offload) -> None:
    strategy = strategy_of(given)
    assert isinstance(strategy, Offload)
    assert offload_context(strategy) == given
    assert str(strategy) == repr(given)


def test_an_unknown_word_is_refused_with_those_there_are() -> None:
    message = r"one of \['keep', 'recompute', 'offload', 'spill', 'rows'\], but got 'drop'"
    with pytest.raises(ValueError, match=message):
        strategy_of("drop")


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (Recompute(), "recompute"),
        (Offload(tier="disk", quota=1.0), "spill"),
        (Selective(policies.keep("aten::mm")), "keep('aten::mm')"),
        (SavedIndices((3, 1), (2,)), "<recompute saves [1, 3], offload saves [2], keep the rest>"),
        (Selective(NumberedOps((), (2,), "disk")), "<spill ops [2], recompute the rest>"),
        (Tile(4), "tile in 4 chunks, recompute"),
    ],
    ids=repr,
)
def test_a_strategy_is_applied_and_printed(strategy: Strategy, text: str) -> None:
    model = Stack(2)
    applied = rekindle.apply(model, strategy)
    assert [entry.strategy for entry in applied.entries] == [strategy] * 2
    assert str(applied) == f"Stack\n  blocks.0-1: 2 x Block: {text}"
    model(torch.ones(2, 8)).sum().backward()
    rekindle.remove(model)
