"""What a plan says of a little less memory and of a little more: against every choice there is."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import rekindle
from rekindle._api import planning
from rekindle.planner import plan_for_budget, verified_plan
from rekindle.planner.measure.measure_step import MeasuredStep
from rekindle.planner.solve import solver
from rekindle.planner.timeline import simulate
from rekindle.planner.types import BlockProfile, Candidate, Nearby, Profile, Solution
from rekindle.strategy import Keep, Recompute
from tests.planner.random_profiles import (
    GAP,
    MIB,
    all_choices,
    budgets,
    every_profile,
    fastest,
    of_one_kind_and_of_two,
    random_profile,
    with_and_without_a_link,
)
from tests.toys import Stack

KEEP = Candidate(Keep(), bytes_held=100 * MIB, forward_seconds=1.0, backward_seconds=2.0)
DROP = Candidate(Recompute(), bytes_held=0, forward_seconds=1.0, backward_seconds=3.0)


def toy(*kinds: Candidate, blocks: int = 10, static: int = 0) -> Profile:
    """Blocks that are kept in 100 MiB or made again in a second; the kinds differ by their name."""
    known = tuple(
        BlockProfile(f"Kind{i}", f"Kind{i}", (KEEP, option)) for i, option in enumerate(kinds)
    )
    order = tuple((f"blocks.{i}", i % len(kinds)) for i in range(blocks))
    return Profile("Toy", "none", "", static, 0, 0, 0.0, 0.0, known, order)


@cache
def solved(profile: Profile, budget: int) -> rekindle.Plan:
    return rekindle.solve(profile, budget)


def test_less_and_more_are_a_tenth_of_what_activations_have() -> None:
    plan = rekindle.solve(toy(DROP, static=7 * MIB), 507 * MIB)
    assert plan.less == Nearby(457 * MIB, plan.predicted_time + 1)
    assert plan.more == Nearby(557 * MIB, plan.predicted_time)


@pytest.mark.parametrize("kinds", [(DROP,), (DROP, DROP)], ids=["one kind", "two kinds"])
def test_less_costs_what_one_more_block_costs_and_more_saves_it(
    kinds: tuple[Candidate, ...],
) -> None:
    plan = rekindle.solve(toy(*kinds, blocks=20), 1000 * MIB)
    assert plan.predicted_time == 70
    assert plan.less == Nearby(900 * MIB, 71.0)
    assert plan.more == Nearby(1100 * MIB, 69.0)


@pytest.mark.parametrize("kinds", [(DROP,), (DROP, DROP)], ids=["one kind", "two kinds"])
def test_with_room_to_spare_less_is_less_than_what_is_used_and_more_changes_nothing(
    kinds: tuple[Candidate, ...],
) -> None:
    plan = rekindle.solve(toy(*kinds), 5000 * MIB)
    assert plan.less == Nearby(900 * MIB, plan.predicted_time + 1)
    assert plan.more == Nearby(5100 * MIB, plan.predicted_time)


def test_at_the_least_that_works_nothing_fits_into_less() -> None:
    drop = replace(DROP, bytes_held=50 * MIB)
    plan = rekindle.solve(toy(drop), 500 * MIB)
    assert plan.less == Nearby(450 * MIB, None)


def test_where_blocks_differ_and_no_change_leads_to_less_nothing_is_said() -> None:
    drop = replace(DROP, bytes_held=50 * MIB)
    plan = rekindle.solve(toy(drop, drop), 500 * MIB)
    assert plan.less is None


def test_a_block_that_is_called_twice_changes_as_one() -> None:
    block = BlockProfile("Block", "Block", (KEEP, DROP))
    order = tuple((f"blocks.{i}", 0) for i in (0, 1, 2, 2, 1, 0))
    profile = Profile("Toy", "none", "", 0, 0, 0, 0.0, 0.0, (block,), order)
    plan = rekindle.solve(profile, 400 * MIB)
    assert plan.less == Nearby(360 * MIB, plan.predicted_time + 2)


@every_profile
@of_one_kind_and_of_two
@with_and_without_a_link
def test_a_step_with_less_or_more_is_one_that_there_is(seed: int, kinds: int, link: bool) -> None:
    profile = random_profile(seed, kinds=kinds, link=link)
    is_solved = kinds == 1 and not link  # else the plan is changed step by step
    choices = all_choices(profile)
    for budget in budgets(choices):
        plan = solved(profile, budget)
        for near in (plan.less, plan.more):
            if near is None or near.seconds is None:
                continue
            known = [c.seconds for c in choices if c.peak <= near.budget]
            assert near.seconds in known
            best = fastest(choices, near.budget)
            assert best <= near.seconds <= best * (1 + (GAP if is_solved else 0.08))


@every_profile
@of_one_kind_and_of_two
def test_less_is_never_faster_and_more_never_slower(seed: int, kinds: int) -> None:
    profile = random_profile(seed, kinds=kinds)
    for budget in budgets(all_choices(profile)):
        plan = solved(profile, budget)
        if plan.less is not None and plan.less.seconds is not None:
            assert plan.less.seconds >= plan.predicted_time
        assert plan.more is not None
        assert plan.more.seconds is not None
        assert plan.more.seconds <= plan.predicted_time


def test_where_blocks_differ_nothing_more_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, solved = toy(DROP, DROP), []
    choose = solver.choose

    def counted(profile: Profile, budget: int) -> Solution | None:
        solved.append(budget)
        return choose(profile, budget)

    monkeypatch.setattr(solver, "choose", counted)
    rekindle.solve(profile, 500 * MIB)
    assert solved == [500 * MIB]


def test_the_plans_of_a_frontier_name_the_points_beside_them() -> None:
    points = rekindle.frontier(random_profile(2), 6)
    assert len(points) > 2
    for i, point in enumerate(points):
        more = Nearby(points[i - 1].peak, points[i - 1].seconds) if i else None
        last = i == len(points) - 1
        less = None if last else Nearby(points[i + 1].peak, points[i + 1].seconds)
        assert (point.plan.less, point.plan.more) == (less, more)


def test_a_fit_that_had_to_aim_lower_tells_of_budgets_as_they_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Stack(6, 16), torch.randn(512, 16, requires_grad=True)
    profile, tried = rekindle.profile(model, x), []

    def too_high_at_first(_step: Any, plan: rekindle.Plan, _profile: Any, **_: Any) -> MeasuredStep:
        tried.append(plan)
        peak = limit + 1000 if len(tried) == 1 else limit
        return MeasuredStep(peak, plan.predicted_time)

    monkeypatch.setattr(planning, "profile", lambda *_, **__: profile)
    monkeypatch.setattr(verified_plan, "measure_step", too_high_at_first)
    limit = plan_for_budget.budget_bytes(profile, "90%")
    plan = rekindle.fit(model, x, limit)
    aim = limit - 1000 - limit // 200
    assert [each.budget for each in tried] == [limit, aim]
    direct = rekindle.solve(profile, aim)
    assert plan.less is not None
    assert direct.less is not None
    assert plan.less == replace(direct.less, budget=direct.less.budget + limit - aim)
    assert plan.more is not None
    assert direct.more is not None
    assert plan.more == replace(direct.more, budget=direct.more.budget + limit - aim)


def test_what_is_said_of_now_is_what_the_simulation_says() -> None:
    profile = random_profile(5)
    plan = rekindle.solve(profile, "70%")
    found = simulate(profile, [option for _, _, option in plan.blocks])
    assert (plan.predicted_peak, plan.predicted_time) == (found.peak, found.seconds)
