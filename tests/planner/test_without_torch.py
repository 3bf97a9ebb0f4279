"""The planner's core runs in a process that has no torch, and but for solving no scipy either."""

import subprocess
import sys

import pytest

import rekindle  # noqa: F401  (for its path)

CORE = ["types", "plan", "frontier", "largest", "largest_search", "json_files", "keep_sets"]
CORE += ["candidates", "timeline"]
HEAD = """
import sys, types
for name in {missing!r}:
    sys.modules[name] = None
package = sys.modules["rekindle"] = types.ModuleType("rekindle")
package.__path__ = {path!r}
"""
"""In a process where some modules cannot be imported, and rekindle's own `__init__` is left out."""

PLANNING = """
from rekindle.planner.candidates import candidates, offloading
from rekindle.planner.timeline import simulate
from rekindle.planner.types import BlockProfile, BlockTrace, Profile, TracedOp, TracedValue
ops = tuple(TracedOp(i, "aten::mm", 1.0, (i - 1,) if i else (), (i,)) for i in range(4))
trace = BlockTrace(ops, tuple(TracedValue(2**20, i) for i in range(4)), frozenset(range(4)))
found = candidates(trace)
assert len(found) == 6
assert offloading(found[2], trace)
block = BlockProfile("Block", "Block", found)
order = (("0", 0), ("1", 0))
profile = Profile("Model", "none", "", 0, 0, 0, 0.0, 0.0, (block,), order)
assert simulate(profile, found[:2]).peak == 0
"""
SOLVING = """
from rekindle.planner.solve import solver
assert solver.choose(profile, 2**20).prediction.peak == 0
"""


def run(code: str, missing: list[str]) -> None:
    head = HEAD.format(missing=missing, path=list(sys.modules["rekindle"].__path__))
    subprocess.run([sys.executable, "-c", head + code], check=True)


def test_values_candidates_and_the_timeline_need_neither_torch_nor_scipy() -> None:
    imports = "".join(f"import rekindle.planner.{name}\n" for name in CORE)
    run(imports + PLANNING, ["torch", "scipy", "numpy"])


def test_solving_needs_no_torch() -> None:
    pytest.importorskip("scipy")
    run(PLANNING + SOLVING, ["torch"])
