"""Parts of a step around a planned model: heads, batches, blocks that do not run, random states."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle._api import planning
from rekindle.planner import plan_for_budget, verified_plan
from rekindle.planner.measure.measure_step import MeasuredStep
from rekindle.planner.solve import solver
from tests.toys import Block, Stack

pytest.importorskip("scipy")


@pytest.mark.parametrize("had_gradients", [True, False])
def test_what_is_outside_the_model_ends_with_the_gradients_it_had(had_gradients: bool) -> None:
    model, head = Stack(4, 16), nn.Linear(16, 1)
    x = torch.randn(64, 16, requires_grad=True)
    leaves = [x, *head.parameters()]
    if had_gradients:
        for leaf in leaves:
            leaf.grad = torch.ones_like(leaf)
    before = [leaf.grad for leaf in leaves]
    rekindle.fit(model, lambda: head(model(x)).square().mean(), "80%")
    assert all(leaf.grad is gradient for leaf, gradient in zip(leaves, before, strict=True))
    assert all(gradient is None or bool((gradient == 1).all()) for gradient in before)
    assert all(p.grad is None for p in model.parameters())


def test_a_batch_that_learns_ends_without_a_gradient() -> None:
    x = torch.randn(64, 16, requires_grad=True)
    rekindle.profile(Stack(3, 16), x)
    assert x.grad is None


def test_random_states_of_python_and_numpy_end_as_they_were() -> None:
    numpy = pytest.importorskip("numpy")

    class Drawing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + random.random() + numpy.random.rand())

    states = random.getstate(), numpy.random.get_state()[1].tolist()
    rekindle.profile(nn.Sequential(*[Drawing(16) for _ in range(3)]), torch.randn(8, 16))
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states


class Half(nn.Module):
    """Of its blocks, only some run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:4]:
            x = layer(x)
        return x


def test_blocks_that_the_step_does_not_run_stay_as_they_are() -> None:
    model, x = Half(), torch.randn(64, 16)
    plan = rekindle.fit(model, x, "80%")
    assert plan.unused == ("layers.4", "layers.5")
    assert [path for path, _, _ in plan.blocks] == [f"layers.{i}" for i in range(4)]
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget


def test_a_plan_and_a_profile_know_such_blocks_after_a_round_trip(tmp_path: Any) -> None:
    profile = rekindle.profile(Half(), torch.randn(64, 16))
    profile.save(tmp_path / "profile.json")
    assert rekindle.Profile.load(tmp_path / "profile.json") == profile
    plan = rekindle.solve(profile, "80%")
    plan.save(tmp_path / "plan.json")
    assert rekindle.Plan.load(tmp_path / "plan.json") == plan
    rekindle.apply(Half(), plan)


def test_a_block_that_is_new_is_still_refused() -> None:
    plan = rekindle.solve(rekindle.profile(Half(), torch.randn(64, 16)), "80%")
    longer = Half()
    longer.layers.append(Block(16))
    with pytest.raises(ValueError, match=r"layers\.6"):
        rekindle.apply(longer, plan)


def test_the_last_plan_that_is_tried_is_the_least_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Stack(6, 16), torch.randn(256, 16)
    profile, tried = replace(rekindle.profile(model, x), recompute_peak=None), []
    least = solver.least_peak(profile).prediction.peak
    monkeypatch.setattr(planning, "profile", lambda *_, **__: profile)

    def always_more(_step: Any, plan: rekindle.Plan, _profile: Any, **_: Any) -> MeasuredStep:
        tried.append(plan)
        peak = limit + (0 if plan.predicted_peak == least else 10_000_000)
        return MeasuredStep(peak, plan.predicted_time)

    monkeypatch.setattr(verified_plan, "measure_step", always_more)
    limit = plan_for_budget.budget_bytes(profile, "80%")
    plan = rekindle.fit(model, x, limit)
    assert plan.predicted_peak == least
    assert len(tried) == 2


def test_a_model_that_is_one_block_is_named() -> None:
    profile = rekindle.profile(nn.Linear(16, 16), torch.randn(64, 16))
    assert rekindle.solve(profile, "200%").peak_at in (
        "the forward of the model",
        "the backward of the model",
        "the head and the loss",
    )


@pytest.mark.parametrize("wrong", ["x", None])
def test_a_frontier_of_something_else_is_a_clear_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match="frontier\\(\\) takes a profile"):
        rekindle.frontier(wrong)
