"""Strategies are values: comparable, hashable, printed as the code that makes them."""

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from rekindle import strategy
from rekindle.strategy import (
    Keep,
    Offload,
    OpAddress,
    PlannedOps,
    Recompute,
    SavedIndices,
    Selective,
    Strategy,
    Tile,
)

ADDRESS = OpAddress("mlp", "aten::mm", 0, 2)
EACH: list[Strategy] = [
    Keep(),
    Recompute(),
    Selective(PlannedOps((ADDRESS,))),
    SavedIndices((1, 2), (0,), count=3),
    Offload(tier="disk", quota=1.0),
    Tile(4, Keep()),
]


@pytest.mark.parametrize("value", EACH, ids=lambda value: type(value).__name__)
def test_a_strategy_prints_as_the_code_that_makes_it(value: Strategy) -> None:
    assert eval(repr(value), vars(strategy)) == value


def test_strategies_of_different_kinds_differ() -> None:
    assert len(set(EACH)) == len(EACH)


def test_a_strategy_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EACH[4].tier = "host"  # type: ignore[attr-defined]


def test_strategies_import_no_torch() -> None:
    """In a process where torch cannot be imported, and rekindle's own `__init__` is left out."""
    code = (
        "import sys, types; sys.modules['torch'] = None\n"
        "package = sys.modules['rekindle'] = types.ModuleType('rekindle')\n"
        f"package.__path__ = {list(sys.modules['rekindle'].__path__)!r}\n"
        "import rekindle.strategy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
