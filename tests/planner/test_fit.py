"""`fit` on whole models: within the budget, with the gradients of a plain step."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rekindle
from rekindle._api import planning
from rekindle.modules.forward import forward_of
from rekindle.planner.plan_for_budget import plan_by
from rekindle.planner.timeline import simulate
from rekindle.strategy import Keep, Recompute, SavedIndices
from tests.planner.cases import (
    Case,
    Language,
    all_same,
    by_keywords,
    every_case,
    every_case_once,
    fit_by,
    gpt2_with_cache,
    least,
    llama_with_cache,
    profile_of,
    small_gpt,
    step,
    twice,
    two_kinds,
    unchanged,
    with_buffers,
)
from tests.toys import Block, Mlp, Stack

pytest.importorskip("scipy")


@pytest.mark.parametrize("case", [small_gpt, two_kinds, with_buffers, by_keywords])
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_plan_gives_the_gradients_of_a_plain_step(
    case: Callable[[], Case], data: st.DataObject
) -> None:
    profile = profile_of(case)
    options = [
        data.draw(st.sampled_from(profile.candidates(i)), label=path)
        for i, (path, _) in enumerate(profile.order)
    ]
    plan = plan_by(profile, 0, options, simulate(profile, options), 0.0)
    model, batch = case()
    plain = step(model, batch)
    rekindle.apply(model, plan)
    assert all_same(plain, step(model, batch))


@every_case
def test_a_model_fits_its_budget(case: Callable[[], Case]) -> None:
    model, batch = case()
    profile = profile_of(case)
    budget = (least(profile) + rekindle.frontier(profile, 1)[0].peak) // 2
    plan = fit_by(profile, model, batch, budget)
    assert plan.budget == budget
    assert plan.predicted_peak <= budget
    assert plan.measured_peak is not None
    assert plan.measured_peak <= budget


@every_case_once
def test_a_model_fits_the_least_budget_there_is(case: Callable[[], Case]) -> None:
    model, batch = case()
    profile = profile_of(case)
    plan = fit_by(profile, model, batch, least(profile))
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget


@every_case_once
def test_a_model_that_fits_has_the_gradients_it_had(case: Callable[[], Case]) -> None:
    model, batch = case()
    plain = step(model, batch)
    profile = profile_of(case)
    fit_by(profile, model, batch, least(profile))
    assert all_same(plain, step(model, batch))
    rekindle.remove(model)
    assert all_same(plain, step(model, batch))


def test_a_profile_that_is_given_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Stack(4, 32), torch.randn(64, 32)
    profile = rekindle.profile(model, x)
    monkeypatch.setattr(planning, "profile_model", None)
    plans = [rekindle.fit(model, x, share, profile=profile) for share in ("90%", "60%")]
    assert all(plan.measured_peak <= plan.budget for plan in plans)  # type: ignore[operator]
    assert plans[1].budget < plans[0].budget
    assert rekindle.plan_of(model) is plans[1]


def test_to_recompute_by_one_op_is_a_candidate_and_holds_exactly_that_much_less() -> None:
    model = nn.Sequential(*[Mlp(16, 64) for _ in range(2)])
    (block,) = rekindle.profile(model, torch.randn(32, 16, requires_grad=True)).blocks
    keep = next(option for option in block.candidates if option.strategy == Keep())
    derive = next(
        option for option in block.candidates if isinstance(option.strategy, SavedIndices)
    )
    assert derive.recomputed_names == ("gelu",)
    assert keep.bytes_held - derive.bytes_held == 32 * 64 * 4


def test_a_second_fit_replaces_the_first() -> None:
    model, batch = Stack(4, 16, 0.1), torch.randn(512, 16)
    plain = step(model, batch)
    first = rekindle.fit(model, batch, "50%")
    second = rekindle.fit(model, batch, "100%")
    assert second.plain_peak <= first.plain_peak  # measured, and predicted
    assert second.keeps_all
    assert second.budget > first.budget
    assert all_same(plain, step(model, batch))
    rekindle.remove(model)
    assert all(forward_of(module) is None for module in model.modules())


def test_a_model_that_has_strategies_is_measured_without_them() -> None:
    model, batch = Stack(4, 16), torch.randn(512, 16)
    plain = rekindle.profile(model, batch)
    rekindle.apply(model, "recompute")
    with unchanged(model):
        again = rekindle.profile(model, batch)
    assert again.static_bytes == plain.static_bytes
    assert again.rest_peak == plain.rest_peak
    for strategy in (Keep(), Recompute()):
        held = [
            next(o.bytes_held for o in p.candidates(0) if o.strategy == strategy)
            for p in (plain, again)
        ]
        assert held[0] == held[1]


def test_strategies_outside_the_blocks_are_gone_after_a_fit() -> None:
    model, batch = by_keywords()
    rekindle.apply(model, {"head": "recompute"})
    rekindle.fit(model, batch, "100%")
    assert forward_of(model.get_submodule("head")) is None


def test_gradients_add_up_over_micro_batches_as_without_a_plan() -> None:
    model, batch = Language(), torch.randint(40, (3, 2, 64))
    micro = [{"words": words, "labels": labels} for words, labels in batch]

    def accumulated() -> list[Tensor | None]:
        model.zero_grad()
        torch.manual_seed(0)
        for part in micro:
            model(**part)["loss"].backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    plain = accumulated()
    rekindle.fit(model, micro[0], "70%")
    assert all_same(plain, accumulated())


class Linears(nn.Module):
    """A block whose result has the type that autocast gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(16, 64, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.mlp(x))


@pytest.mark.parametrize("block", [Linears, lambda: Block(16, 0.1)], ids=["bf16", "mixed"])
def test_a_step_with_autocast_inside_fits(block: Callable[[], nn.Module]) -> None:
    model, x = nn.Sequential(*(block() for _ in range(4))), torch.randn(256, 16)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean()  # type: ignore[no-any-return]

    plain = step(model, loss)
    plan = rekindle.fit(model, loss, "85%")
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    assert all_same(plain, step(model, loss))


def test_autocast_inside_a_step_halves_what_is_held() -> None:
    model, x = nn.Sequential(*(Linears() for _ in range(4))), torch.randn(256, 16)

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean()  # type: ignore[no-any-return]

    held = [
        next(
            o.bytes_held
            for o in rekindle.profile(model, batch).candidates(3)
            if o.strategy == Keep()
        )
        for batch in (x, loss)
    ]
    assert held[1] <= 0.7 * held[0]


def test_a_fit_inside_autocast_gives_the_gradients_of_a_plain_step() -> None:
    model, x = nn.Sequential(*(Linears() for _ in range(4))), torch.randn(256, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = step(model, x)
        rekindle.fit(model, x, "85%")
        assert all_same(plain, step(model, x))


def test_a_block_that_is_run_twice_has_one_strategy() -> None:
    model, batch = twice()
    profile = rekindle.profile(model, batch)
    for point in rekindle.frontier(profile, 5):
        chosen: dict[str, set[Any]] = {}
        for path, _, option in point.plan.blocks:
            chosen.setdefault(path, set()).add(option)
        assert all(len(options) == 1 for options in chosen.values())


def test_blocks_that_learn_and_blocks_that_do_not_are_distinct() -> None:
    model = Stack(4, 16)
    model.blocks[1:3].requires_grad_(False)
    profile = rekindle.profile(model, torch.randn(64, 16).requires_grad_())
    kinds = [index for _, index in profile.order]
    assert kinds[0] == kinds[3]
    assert kinds[1] == kinds[2]
    assert kinds[0] != kinds[1]


def test_a_model_whose_first_blocks_are_frozen_fits() -> None:
    model, x = Stack(6, 16), torch.randn(512, 16)
    model.blocks[:3].requires_grad_(False)
    plain = step(model, x)
    plan = rekindle.fit(model, x, "70%")
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    assert all_same(plain, step(model, x))


def test_a_plan_of_a_fit_can_be_applied_to_another_model_of_the_class() -> None:
    model, batch = Stack(4, 16, 0.1), torch.randn(256, 16)
    plan = rekindle.fit(model, batch, "60%")
    other = copy.deepcopy(model)
    rekindle.remove(other)
    plain = step(other, batch)
    rekindle.apply(other, replace(plan, measured_peak=None))
    assert all_same(plain, step(other, batch))


@pytest.mark.parametrize("case", [llama_with_cache, gpt2_with_cache])
def test_a_model_that_fits_keeps_no_cache_while_it_trains(case: Callable[[], Case]) -> None:
    model, batch = case()
    assert model(**batch).past_key_values is not None
    plain = step(model, batch)
    rekindle.fit(model, batch, "80%")
    assert all_same(plain, step(model, batch))
    assert model(**batch).past_key_values is None
    assert model(**batch, use_cache=True).past_key_values is None
    model.eval()
    assert model(**batch).past_key_values is not None
    rekindle.remove(model)
    assert model.train()(**batch).past_key_values is not None
    assert not any(module._forward_pre_hooks for module in model.modules())
