"""Solving profiles that were measured on an H200: plans stay as fast as they have been."""

from pathlib import Path

import pytest

import rekindle
from rekindle.planner.solve import solver
from rekindle.planner.solve.milp import ROUGH

pytest.importorskip("scipy")

PROFILES = Path(__file__).parents[1] / "data" / "h200"
NOISE = 1e-3
REACHED = [
    ("8b", "50%", 0.19926337021545543),
    ("8b", "20%", 0.21726373994567438),
    ("1b", "50%", 0.2718126536371099),
    ("1b", "20%", 0.29471679250310184),
    ("gpt2", "50%", 0.24858904630358),
    ("gpt2", "35%", 0.2636995904765014),
]
"""Names, budgets, and seconds of the plans that the solver found before it had one local search."""


@pytest.mark.parametrize(("name", "budget", "reached"), REACHED)
def test_a_plan_is_no_slower_than_it_has_been(
    name: str, budget: str, reached: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No limit on the clock: a slow machine finds the same plan.
    monkeypatch.setattr(solver, "ROUGH", ROUGH._replace(seconds=60.0))
    profile = rekindle.Profile.load(PROFILES / f"profile-{name}.json")
    plan = rekindle.solve(profile, budget)
    assert plan.predicted_peak <= plan.budget
    assert plan.predicted_time <= reached * (1 + NOISE)
