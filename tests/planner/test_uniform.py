"""The floor of plans: none is slower than the best uniform one that fits."""

import itertools
from dataclasses import replace

import pytest
import torch

import rekindle
from rekindle.planner.solve.solver import choose
from rekindle.planner.solve.uniform import best_uniform
from rekindle.planner.timeline import Timeline, simulate
from rekindle.planner.types import Candidate, Profile
from rekindle.strategy import Keep, Recompute
from tests.planner.random_profiles import (
    all_choices,
    budgets,
    every_profile,
    of_one_kind_and_of_two,
    random_profile,
    with_and_without_a_link,
)
from tests.toys import Stack

pytest.importorskip("scipy")


def of_first(profile: Profile, count: int) -> list[Candidate]:
    """The candidates by which the first so many blocks are recomputed, and the others kept."""
    strategies = [Recompute() if i < count else Keep() for i in range(len(profile.order))]
    return [
        next(each for each in profile.candidates(i) if each.strategy == strategy)
        for i, strategy in enumerate(strategies)
    ]


@every_profile
@of_one_kind_and_of_two
@with_and_without_a_link
def test_no_plan_is_slower_than_to_recompute_k_of_n(seed: int, kinds: int, link: bool) -> None:
    profile = random_profile(seed, kinds=kinds, link=link)
    found = [simulate(profile, of_first(profile, k)) for k in range(len(profile.order) + 1)]
    for budget in budgets(all_choices(profile)):
        fits = [each.seconds for each in found if each.peak <= budget]
        chosen = choose(profile, budget)
        if fits:
            assert chosen is not None
            assert chosen.prediction.peak <= budget
            assert chosen.prediction.seconds <= min(fits)


@every_profile
def test_the_best_uniform_choice_fits_and_has_one_kind_of_treatment(seed: int) -> None:
    profile = random_profile(seed, kinds=1, link=True)
    for budget in budgets(all_choices(profile)):
        floor = best_uniform(Timeline(profile), budget)
        if floor is None:
            continue
        assert floor.prediction.peak <= budget
        treated = list(
            itertools.dropwhile(lambda each: each.strategy == Keep(), reversed(floor.candidates))
        )
        assert len({each.strategy for each in treated}) <= 1


def test_a_budget_that_a_recomputed_step_was_measured_in_is_never_refused() -> None:
    model, batch = Stack(6, 16), torch.randn(256, 16)
    profile = rekindle.profile(model, batch)
    assert profile.recompute_peak is not None
    wrong = replace(profile, before_bytes=profile.before_bytes + 2**20)  # predictions too high
    plan = rekindle.solve(wrong, profile.recompute_peak)
    assert {type(each.strategy) for _, _, each in plan.blocks} == {Recompute}
    assert plan.predicted_peak == profile.recompute_peak
    fitted = rekindle.fit(model, batch, profile.recompute_peak, profile=wrong)
    assert fitted.measured_peak is not None
    assert fitted.measured_peak <= profile.recompute_peak
    with pytest.raises(rekindle.BudgetError, match="No plan fits"):
        rekindle.solve(wrong, profile.recompute_peak - 1)


def test_a_refusal_says_how_large_a_batch_would_fit() -> None:
    model, batch = Stack(6, 16), torch.randn(256, 16)
    profile = rekindle.profile(model, batch)
    assert profile.recompute_peak is not None
    half = profile.static_bytes + (profile.recompute_peak - profile.static_bytes) // 2
    with pytest.raises(
        rekindle.BudgetError, match=r"A batch of about \d\d % of this one would fit"
    ):
        rekindle.solve(profile, half)
