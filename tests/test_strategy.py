"""Strategies are values: comparable, hashable, printed as the code that makes them."""

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from rekindle import policies, strategy
from rekindle.strategy import (
    Compiled,
    Keep,
    NumberedOps,
    Offload,
    OpAddress,
    PlannedOps,
    Recompute,
    Rows,
    SavedIndices,
    Selective,
    Strategy,
    Tile,
)
from rekindle.strategy_json import from_json, to_json

ADDRESS = OpAddress("mlp", "aten::mm", 0, 2)
EACH: list[Strategy] = [
    Keep(),
    Recompute(),
    Selective(PlannedOps((ADDRESS,))),
    SavedIndices((1, 2), (0,), count=3),
    SavedIndices((1,), count=3, modules=("mlp.act", "norm")),
    Offload(tier="disk", quota=1.0),
    Tile(4, Keep()),
    Compiled(0.25),
    Compiled(0.0, SavedIndices((), (1, 4), "disk", 9)),
    Rows(),
    Rows(exact=False),
    Selective(NumberedOps((1, 3), (2,), "disk")),
    Selective(
        policies.at("mlp", policies.keep(policies.MATMULS)) | policies.keep_inputs("aten::mm")
    ),
    Selective(policies.first(2, policies.named("a", fate="spill")) | policies.recompute_cheap),
    Selective(policies.every(3, policies.offload())),
]


@pytest.mark.parametrize("value", EACH, ids=lambda value: type(value).__name__)
def test_a_strategy_prints_as_the_code_that_makes_it(value: Strategy) -> None:
    assert eval(repr(value), {**vars(policies), **vars(strategy)}) == value


def test_strategies_of_different_kinds_differ() -> None:
    assert len(set(EACH)) == len(EACH)


@pytest.mark.parametrize("value", EACH, ids=lambda value: type(value).__name__)
def test_a_strategy_is_the_same_after_it_was_saved_as_json(value: Strategy) -> None:
    text = json.dumps(to_json(value), allow_nan=False)
    assert from_json(json.loads(text)) == value


def test_indices_are_sorted_and_distinct() -> None:
    assert SavedIndices((2, 1, 2)) == SavedIndices((1, 2))


def test_a_quota_of_one_byte_is_not_a_share_of_one() -> None:
    assert Offload(quota=1) != Offload(quota=1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "strategy should be an object with a field 'strategy', but is None"),
        ({"strategy": "drop"}, "strategy.strategy should be one of keep, recompute, .*'drop'"),
        ({"strategy": "keep", "tier": "host"}, "strategy.tier should be no field"),
        ({"strategy": "selective"}, "strategy.policy should be a field, but is missing"),
        ({"strategy": "selective", "policy": {"policy": "mine"}}, "policy.policy should be one of"),
        ({"strategy": "tile", "chunks": 0}, "strategy.chunks should be a whole number from 1 on"),
        (
            {"strategy": "tile", "chunks": 2, "inner": {"strategy": 1}},
            "strategy.inner.strategy should be one of",
        ),
        (
            {"strategy": "saved_indices", "offloaded": [1, True]},
            r"strategy.offloaded\[1\] should be a whole number from 0 on, but is True",
        ),
        (
            {"strategy": "saved_indices", "recomputed": [1], "offloaded": [1]},
            "strategy.recomputed has 1, which is in offloaded, too",
        ),
        ({"strategy": "offload", "tier": "tape"}, "strategy.tier should be one of host, disk"),
        ({"strategy": "offload", "quota": 1.5}, "strategy.quota should be bytes"),
        ({"strategy": "offload", "derive": 1}, "strategy.derive should be true or false"),
        (
            {
                "strategy": "selective",
                "policy": {"policy": "planned_ops", "kept": [{"module": "", "op": "aten::mm"}]},
            },
            r"strategy.policy.kept\[0\].index should be a field, but is missing",
        ),
        (
            {"strategy": "selective", "policy": {"policy": "ops", "decision": "drop", "ops": None}},
            "strategy.policy.decision: .*'drop'",
        ),
        (
            {"strategy": "selective", "policy": {"policy": "inputs", "ops": ["aten::no_such_op"]}},
            "strategy.policy.ops: There is no op 'aten::no_such_op'",
        ),
    ],
)
def test_json_that_is_no_strategy_is_refused_with_its_place(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(values)


def test_a_policy_that_is_a_python_function_is_not_saved() -> None:
    policy = policies.of(lambda ctx, op, *args: True)
    with pytest.raises(ValueError, match="it is Python code"):
        to_json(Selective(policies.keep("aten::mm") | policy))


def test_a_strategy_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EACH[4].tier = "host"  # type: ignore[attr-defined]


def test_strategies_import_no_torch() -> None:
    """In a process where torch cannot be imported, and rekindle's own `__init__` is left out."""
    code = (
        "import sys, types; sys.modules['torch'] = None\n"
        "package = sys.modules['rekindle'] = types.ModuleType('rekindle')\n"
        f"package.__path__ = {list(sys.modules['rekindle'].__path__)!r}\n"
        "from rekindle.strategy import *\n"
        "from rekindle.strategy_json import from_json, to_json\n"
        "for value in [Keep(), Selective(PlannedOps()), Tile(2)]:\n"
        "    assert from_json(to_json(value)) == value\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
