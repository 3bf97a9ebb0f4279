"""`fit` compares plans by what is measured, where a step takes longer than was predicted."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import rekindle
from rekindle.planner import verified_plan
from rekindle.planner.measure.measure_step import MeasuredStep
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import BlockProfile, Candidate
from rekindle.strategy import Keep, Recompute, SavedIndices, Selective
from tests.toys import Stack

pytest.importorskip("scipy")

Measure = Callable[[rekindle.Plan], float]


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Measure], tuple[rekindle.Plan, int]]:
    """A plan that `fit` made if steps take so long, and how many plans it tried.

    Times are those of a table, for which the plan goes op by op whatever the machine does.
    """

    def fit(seconds: Measure) -> tuple[rekindle.Plan, int]:
        tried = []

        def measure_step(_step: Any, plan: rekindle.Plan, _profile: Any, **_: Any) -> MeasuredStep:
            tried.append(plan)
            return MeasuredStep(plan.predicted_peak, seconds(plan))

        monkeypatch.setattr(verified_plan, "measure_step", measure_step)
        model, batch = Stack(6, 64), torch.randn(256, 64)
        plan = rekindle.fit(model, batch, budget="70%", profile=profile_that_selects())
        assert rekindle.plan_of(model) == plan
        return plan, len(tried)

    return fit


def goes_op_by_op(plan: rekindle.Plan) -> bool:
    return any(isinstance(option.strategy, Selective) for _, _, option in plan.blocks)


def keeps_or_recomputes(plan: rekindle.Plan) -> bool:
    return all(option.strategy in (Keep(), Recompute()) for _, _, option in plan.blocks)


def recomputes_modules(option: Candidate) -> bool:
    return isinstance(option.strategy, Recompute | SavedIndices)


@cache
def profile_that_selects() -> rekindle.Profile:
    """As if to recompute a block whole, or modules of it, took long: then plans go op by op."""
    profile = rekindle.profile(Stack(6, 64), torch.randn(256, 64), device="meta", like="cpu")
    blocks = [
        replace(
            block,
            candidates=tuple(
                replace(o, backward_seconds=1.0) if recomputes_modules(o) else o
                for o in block.candidates
            ),
        )
        for block in profile.blocks
    ]
    return replace(profile, blocks=tuple(blocks))


def test_a_step_that_is_on_time_is_not_compared(fitted: Any) -> None:
    plan, tried = fitted(lambda plan: plan.predicted_time)
    assert tried == 1
    assert goes_op_by_op(plan)


def test_a_late_step_gives_way_to_a_plan_that_is_faster(fitted: Any) -> None:
    plan, tried = fitted(lambda plan: 9.0 if goes_op_by_op(plan) else 8.0)
    assert tried == 3  # op by op, by saved indices, of whole blocks
    assert not goes_op_by_op(plan)
    assert (plan.measured_time, plan.measured_peak) == (8.0, plan.predicted_peak)


def test_a_late_step_stays_if_the_others_are_later(fitted: Any) -> None:
    plan, tried = fitted(lambda plan: 8.0 if goes_op_by_op(plan) else 9.0)
    assert tried == 3
    assert goes_op_by_op(plan)
    assert plan.measured_time == 8.0


def test_a_plan_of_whole_blocks_is_the_floor_of_what_is_measured(fitted: Any) -> None:
    plan, _ = fitted(lambda plan: 8.0 if keeps_or_recomputes(plan) else 9.0)
    assert keeps_or_recomputes(plan)
    assert plan.measured_time == 8.0


def test_a_plan_that_should_take_longer_than_was_measured_is_not_tried(fitted: Any) -> None:
    """A block recomputed whole takes a second here, so the other plans take longer."""
    _, tried = fitted(lambda plan: plan.predicted_time + 0.2)
    assert tried == 1


def test_milliseconds_are_not_late(fitted: Any) -> None:
    _, tried = fitted(lambda plan: plan.predicted_time + 0.0015)
    assert tried == 1


KEEP = Candidate(Keep(), 100, 0, 1.0, 2.0, 110, 30)
DROP = Candidate(Recompute(), 10, 0, 1.0, 2.5, 90, 120)
AWAY = Candidate(SavedIndices(offloaded=(1,), count=2), 10, 50, 1.0, 2.0, 60, 70, largest_moved=50)


def tries_of(monkeypatch: pytest.MonkeyPatch, seconds: float, drop: Candidate = DROP) -> list[bool]:
    """Whether each plan that is tried offloads, if those that do peak too high and take so long."""
    block = BlockProfile("Block", "Block", (KEEP, drop, AWAY))
    order = tuple((f"blocks.{i}", 0) for i in range(8))
    profile = rekindle.Profile("Stack", "none", "", 0, 0, 0, 0.0, 100.0, (block,), order)
    limit, tried = 600, []

    def measure_step(_step: Any, plan: rekindle.Plan, _profile: Any, **_: Any) -> MeasuredStep:
        tried.append(plan.offloads)
        if plan.offloads:
            return MeasuredStep(limit + 1, seconds)
        return MeasuredStep(plan.predicted_peak, plan.predicted_time)

    monkeypatch.setattr(verified_plan, "measure_step", measure_step)
    step = TrainingStep(Stack(8), torch.randn(1, 16))
    plan = verified_plan.fastest_verified_plan(step, profile, limit)
    assert not plan.offloads
    return tried


def test_offload_that_peaks_too_high_and_is_late_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tries_of(monkeypatch, seconds=99.0) == [True, False]


def test_offload_that_peaks_too_high_in_time_is_tried_with_a_lower_aim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tries_of(monkeypatch, seconds=1.0)[:2] == [True, True]


def test_offload_that_should_hardly_be_faster_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = replace(DROP, backward_seconds=2.01)
    assert tries_of(monkeypatch, seconds=1.0, drop=cheap) == [False]
