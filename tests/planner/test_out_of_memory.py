"""Plans whose measured step runs out of memory."""

from typing import Any

import pytest
import torch

import rekindle
from rekindle.planner import verified_plan
from tests.planner.language_models import gpt2

pytest.importorskip("scipy")


def test_a_plan_that_runs_out_of_memory_when_it_is_tried_gives_way_to_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = gpt2()
    profile = rekindle.profile(model, batch)
    aimed = []
    measure_step = verified_plan.measure_step

    def first_fails(step: Any, plan: rekindle.Plan, *args: Any, **options: Any) -> Any:
        aimed.append(plan.predicted_peak)
        if len(aimed) == 1:
            raise torch.OutOfMemoryError("no room")
        return measure_step(step, plan, *args, **options)

    monkeypatch.setattr(verified_plan, "measure_step", first_fails)
    monkeypatch.setattr(verified_plan, "_NOISE_SECONDS", float("inf"))  # no step is late
    plan = rekindle.fit(model, batch, "80%", profile=profile)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    assert len(aimed) == 2
    assert aimed[1] < aimed[0]
    rekindle.remove(model)


def test_a_device_that_has_no_room_for_any_plan_is_a_budget_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(verified_plan, "measure_step", fails)
    model, batch = gpt2()
    with pytest.raises(rekindle.BudgetError, match="out of memory"):
        rekindle.fit(model, batch, "80%")
    assert rekindle.plan_of(model) is None
