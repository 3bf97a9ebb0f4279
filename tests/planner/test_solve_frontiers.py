"""Plans, frontiers and budgets as `solve` and `frontier` take and give them."""

import itertools

import pytest

import rekindle
from rekindle.planner.timeline import simulate
from tests.planner.random_profiles import (
    GAP,
    all_choices,
    every_profile,
    layers,
    of_one_kind_and_of_two,
    random_profile,
)

pytest.importorskip("scipy")


def test_every_block_of_a_plan_has_its_path_and_kind_in_the_order_of_the_forward() -> None:
    profile = random_profile(3)
    plan = rekindle.solve(profile, "70%")
    kinds = [(path, profile.blocks[index].kind) for path, index in profile.order]
    assert [(path, kind) for path, kind, _ in plan.blocks] == kinds


def test_a_plan_says_what_happens_without_it() -> None:
    profile = random_profile(3, link=False)
    keep = [profile.candidates(i)[0] for i in range(len(profile.order))]
    plan = rekindle.solve(profile, "80%")
    plain = simulate(profile, keep)
    assert (plan.plain_peak, plan.plain_time) == (plain.peak, plain.seconds)


def test_a_share_is_one_of_the_peak_of_activations() -> None:
    profile = random_profile(3)
    keep = [profile.candidates(i)[0] for i in range(len(profile.order))]
    activations = simulate(profile, keep).peak - profile.static_bytes
    assert rekindle.solve(profile, "80%").budget == profile.static_bytes + int(0.8 * activations)


@pytest.mark.parametrize("share", ["90%", "50%", "25%"])
def test_a_plan_of_128_layers_is_as_good_as_there_is(share: str) -> None:
    plan = rekindle.solve(layers(128, 1), share)
    assert plan.predicted_peak <= plan.budget
    assert plan.gap <= 1e-3


def test_a_frontier_begins_where_no_memory_is_saved() -> None:
    profile = random_profile(0, link=False)
    best = min(choice.seconds for choice in all_choices(profile))
    assert rekindle.frontier(profile)[0].seconds == pytest.approx(best, rel=GAP)


@every_profile
@of_one_kind_and_of_two
def test_a_frontier_ends_at_the_least_that_works(seed: int, kinds: int) -> None:
    profile = random_profile(seed, kinds=kinds)
    least = min(choice.peak for choice in all_choices(profile))
    assert rekindle.frontier(profile)[-1].peak == pytest.approx(least, rel=3e-3)


@every_profile
def test_along_a_frontier_peaks_fall_and_times_rise(seed: int) -> None:
    points = rekindle.frontier(random_profile(seed))
    for point, after in itertools.pairwise(points):
        assert after.peak < point.peak
        assert after.seconds >= point.seconds * (1 - GAP)


def test_a_point_of_a_frontier_is_what_its_plan_predicts() -> None:
    for point in rekindle.frontier(random_profile(2)):
        assert (point.peak, point.seconds) == (
            point.plan.predicted_peak,
            point.plan.predicted_time,
        )
        assert point.peak <= point.plan.budget


def test_a_frontier_has_at_most_the_points_asked_for() -> None:
    profile = random_profile(0)
    assert len(rekindle.frontier(profile, 1)) == 1
    assert len(rekindle.frontier(profile, 3)) <= 3


@pytest.mark.parametrize("points", [0, -1])
def test_a_frontier_without_points_is_refused(points: int) -> None:
    with pytest.raises(ValueError, match="points"):
        rekindle.frontier(random_profile(0), points)


@pytest.mark.parametrize("budget", ["0%", "-5%", "nan%", "inf%", "%", "5 percent", "", "-1", "4GX"])
def test_a_budget_that_is_no_size_and_no_share_is_refused(budget: str) -> None:
    with pytest.raises(ValueError, match="budget"):
        rekindle.solve(random_profile(0), budget)


@pytest.mark.parametrize("budget", [True, 1.5, None, [1]])
def test_a_budget_of_another_type_is_refused(budget: object) -> None:
    with pytest.raises(TypeError, match="budget"):
        rekindle.solve(random_profile(0), budget)  # type: ignore[arg-type]


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        rekindle.solve(random_profile(0), -1)


def test_solve_takes_a_profile_and_nothing_else() -> None:
    with pytest.raises(TypeError, match="profile"):
        rekindle.solve("a model", "50%")  # type: ignore[arg-type]
