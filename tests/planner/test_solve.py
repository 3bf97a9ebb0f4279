"""The solver, on profiles written by hand: against every choice there is."""

import itertools
import random
import re
from dataclasses import replace

import pytest

import rekindle
from rekindle.planner.solve.local_search import anneal, local_search
from rekindle.planner.solve.solver import choose, least_peak
from rekindle.planner.timeline import Timeline, simulate
from rekindle.planner.types import BlockProfile, Candidate, Profile, Solution
from rekindle.sizes import parse_bytes
from rekindle.strategy import Keep, Recompute
from tests.planner.random_profiles import (
    GAP,
    GIB,
    LINK_GAP,
    MIB,
    MOVE_ONE,
    all_choices,
    budgets,
    chosen,
    every_profile,
    every_scale,
    fastest,
    of_one_kind_and_of_two,
    random_profile,
    with_and_without_a_link,
)

pytest.importorskip("scipy")


@every_profile
@of_one_kind_and_of_two
@with_and_without_a_link
def test_no_choice_within_the_budget_is_faster(seed: int, kinds: int, link: bool) -> None:
    profile = random_profile(seed, kinds=kinds, link=link)
    choices = all_choices(profile)
    for budget in budgets(choices):
        found = chosen(profile, budget)
        gap = LINK_GAP if link else GAP
        assert found.prediction.seconds <= fastest(choices, budget) * (1 + gap)


def passing(profile: Profile, nbytes: int) -> Profile:
    """The profile, as if all but the first block were handed so much, and some let go of it."""
    draw = random.Random(0)
    blocks = [
        replace(
            block,
            candidates=tuple(
                replace(o, input_freed=draw.choice([0, nbytes])) for o in block.candidates
            ),
        )
        for block in profile.blocks
    ]
    passed = (0, *[nbytes] * (len(profile.order) - 1))
    return replace(profile, blocks=tuple(blocks), passed=passed)


@every_profile
@of_one_kind_and_of_two
def test_what_blocks_hand_on_and_let_go_leaves_room_for_faster_choices(
    seed: int, kinds: int
) -> None:
    profile = passing(random_profile(seed, kinds=kinds, link=False), 5 * MIB)
    choices = all_choices(profile)
    for budget in budgets(choices):
        found = chosen(profile, budget)
        assert found.prediction.peak <= budget
        assert found.prediction.seconds <= fastest(choices, budget) * (1 + LINK_GAP)
    plain = [profile.candidates(i)[0] for i in range(len(profile.order))]
    highest = simulate(profile, plain)
    assert chosen(profile, highest.peak).prediction.seconds <= highest.seconds


@every_scale
@of_one_kind_and_of_two
@pytest.mark.parametrize("seed", range(4))
def test_no_choice_is_faster_whatever_the_scale(
    seed: int, kinds: int, unit: int, second: float
) -> None:
    profile = random_profile(seed, kinds=kinds, unit=unit, second=second, blocks=4)
    choices = all_choices(profile)
    for budget in budgets(choices):
        found = chosen(profile, budget)
        assert found.prediction.seconds <= fastest(choices, budget) * (1 + LINK_GAP)


@every_scale
@of_one_kind_and_of_two
@pytest.mark.parametrize("seed", range(4))
def test_the_peak_is_never_above_the_budget(
    seed: int, kinds: int, unit: int, second: float
) -> None:
    profile = random_profile(seed, kinds=kinds, unit=unit, second=second, blocks=4)
    for budget in budgets(all_choices(profile)):
        assert chosen(profile, budget).prediction.peak <= budget


@every_profile
@of_one_kind_and_of_two
def test_a_budget_a_byte_below_the_lowest_peak_fits_nothing(seed: int, kinds: int) -> None:
    profile = random_profile(seed, kinds=kinds)
    least = min(choice.peak for choice in all_choices(profile))
    assert choose(profile, least) is not None
    # HiGHS minds rows to a millionth of a MiB, about a byte.
    assert choose(profile, least - 64) is None


@every_profile
@of_one_kind_and_of_two
def test_a_choice_is_what_the_simulation_says_of_it(seed: int, kinds: int) -> None:
    profile = random_profile(seed, kinds=kinds)
    for budget in budgets(all_choices(profile)):
        found = chosen(profile, budget)
        assert found.prediction == simulate(profile, found.candidates)


@every_profile
@of_one_kind_and_of_two
@with_and_without_a_link
def test_a_smaller_budget_is_never_faster(seed: int, kinds: int, link: bool) -> None:
    profile = random_profile(seed, kinds=kinds, link=link)
    wide_to_narrow = reversed(budgets(all_choices(profile)))
    times = [chosen(profile, budget).prediction.seconds for budget in wide_to_narrow]
    for wide, narrow in itertools.pairwise(times):
        assert narrow >= wide * (1 - (LINK_GAP if link else GAP))


@every_profile
@with_and_without_a_link
def test_a_smaller_budget_never_peaks_higher(seed: int, link: bool) -> None:
    profile = random_profile(seed, kinds=1, link=link)
    wide_to_narrow = reversed(budgets(all_choices(profile)))
    peaks = [chosen(profile, budget).prediction.peak for budget in wide_to_narrow]
    for wide, narrow in itertools.pairwise(peaks):
        assert narrow <= wide * (1 + (LINK_GAP if link else 0.0))


def test_a_smaller_budget_never_peaks_higher_where_many_choices_take_the_same_time() -> None:
    """Contrived: alike blocks, so that which of them recompute changes the peak, not the time."""
    keep = Candidate(Keep(), bytes_held=100 * MIB, forward_peak=100 * MIB, backward_peak=20 * MIB)
    drop = Candidate(
        Recompute(), bytes_held=5 * MIB, forward_peak=90 * MIB, backward_peak=110 * MIB
    )
    keep = replace(keep, forward_seconds=1e-3, backward_seconds=2e-3)
    drop = replace(drop, forward_seconds=1e-3, backward_seconds=3e-3)
    block = BlockProfile("Block", "Block", (keep, drop))
    order = tuple((f"blocks.{i}", 0) for i in range(6))
    profile = Profile("Toy", "none", "", 0, 0, 0, 0.0, 0.0, (block,), order)
    top = simulate(profile, [keep] * 6).peak
    low = least_peak(profile).prediction.peak
    found = [chosen(profile, top - (top - low) * i // 40).prediction for i in range(41)]
    assert [p.peak for p in found] == sorted((p.peak for p in found), reverse=True)


@every_profile
@of_one_kind_and_of_two
def test_the_least_peak_is_the_lowest_peak_there_is(seed: int, kinds: int) -> None:
    profile = random_profile(seed, kinds=kinds)
    least = min(choice.peak for choice in all_choices(profile))
    assert least <= least_peak(profile).prediction.peak <= least * 1.003


def test_the_least_peak_is_found_where_what_holds_most_peaks_lowest() -> None:
    """Contrived: replaying takes less time than keeping, and more room."""
    keep = Candidate(Keep(), 100 * MIB, 0, 1.0, 3.0, 100 * MIB, 0)
    drop = Candidate(Recompute(), 90 * MIB, 0, 1.0, 2.0, 100 * MIB, 60 * MIB)
    block = BlockProfile("Block", "Block", (keep, drop))
    profile = Profile("Toy", "none", "", 0, 0, 0, 0.0, 0.0, (block,), (("0", 0),))
    assert least_peak(profile).prediction.peak == 100 * MIB


def test_a_budget_that_nothing_fits_into_is_refused_with_the_budget() -> None:
    with pytest.raises(rekindle.BudgetError, match=r"No plan fits into 1 KiB\."):
        rekindle.solve(random_profile(0), "1KiB")


@every_profile
@of_one_kind_and_of_two
def test_the_least_budget_that_a_refusal_names_works(seed: int, kinds: int) -> None:
    profile = random_profile(seed, kinds=kinds)
    with pytest.raises(rekindle.BudgetError) as refused:
        rekindle.solve(profile, 1)
    named = re.search(r"The least that works is ([\d.]+ \w+),", str(refused.value))
    assert named is not None
    plan = rekindle.solve(profile, named[1])
    assert plan.predicted_peak <= parse_bytes(named[1], "budget")


@every_profile
def test_a_refusal_names_a_budget_close_to_the_least_there_is(seed: int) -> None:
    profile = random_profile(seed)
    with pytest.raises(rekindle.BudgetError) as refused:
        rekindle.solve(profile, 1)
    named = re.search(r"The least that works is ([\d.]+ \w+),", str(refused.value))
    assert named is not None
    least = min(choice.peak for choice in all_choices(profile))
    assert parse_bytes(named[1], "budget") == pytest.approx(least, rel=5e-3)


def test_a_refusal_says_what_is_there_all_the_time_and_where_the_peak_is() -> None:
    profile = replace(random_profile(0), static_bytes=123 * MIB)
    least = least_peak(profile)
    with pytest.raises(rekindle.BudgetError) as refused:
        rekindle.solve(profile, 1)
    assert "of which 123 MiB are parameters, gradients, optimizer state" in str(refused.value)
    assert f"the peak is in {least.prediction.at}." in str(refused.value)
    assert str(refused.value).endswith(
        "smaller dtype. rekindle.explain says what holds it."
    )  # 123 MiB are over the budget


def test_with_room_for_all_the_fastest_is_taken() -> None:
    profile = random_profile(1, link=False)
    best = [min(profile.candidates(i), key=lambda o: o.seconds) for i in range(len(profile.order))]
    assert chosen(profile, 100 * GIB).prediction.seconds == simulate(profile, best).seconds


def test_of_candidates_that_take_the_same_time_the_one_that_holds_less_is_taken() -> None:
    more = Candidate(Keep(), bytes_held=9 * MIB, forward_seconds=1.0, backward_seconds=1.0)
    less = replace(more, strategy=Recompute(), bytes_held=3 * MIB)
    block = BlockProfile("Block", "Block", (more, less))
    profile = Profile("Toy", "none", "", 0, 0, 0, 0.0, 0.0, (block,), (("0", 0), ("1", 0)))
    assert chosen(profile, GIB).candidates == (less, less)


def test_bytes_are_moved_where_the_link_has_time_for_them() -> None:
    keep = Candidate(Keep(), 100 * MIB, 0, 1.0, 2.0, 100 * MIB, 0)
    drop = Candidate(Recompute(), 0, 0, 1.0, 3.0, 100 * MIB, 100 * MIB)
    move = Candidate(
        MOVE_ONE,
        *(0, 100 * MIB, 1.0, 2.0, 100 * MIB, 100 * MIB),
        largest_moved=100 * MIB,
    )
    block = BlockProfile("Block", "Block", (keep, drop, move))
    order = tuple((str(i), 0) for i in range(12))
    fast = Profile("Toy", "none", "", 0, 0, 0, 0.0, 200.0 * MIB, (block,), order)
    slow = replace(fast, bytes_per_second=10.0 * MIB)
    budget = 800 * MIB  # of 1200 without a plan
    assert chosen(fast, budget).candidates.count(move) >= 4
    assert chosen(fast, budget).prediction.seconds == pytest.approx(12 * 3.0)
    assert move not in chosen(slow, budget).candidates


def test_two_blocks_that_are_better_changed_together_are() -> None:
    one = Candidate(Keep(), bytes_held=6, forward_seconds=1.0), Candidate(MOVE_ONE, 4, 1, 2.0)
    other = (
        Candidate(Keep(), bytes_held=4, forward_seconds=3.0),
        Candidate(MOVE_ONE, 6, 1, 1.0),
    )
    blocks = tuple(BlockProfile("Block", str(i), menu) for i, menu in enumerate((one, other)))
    profile = Profile(
        "Toy", "none", "", 0, 0, 0, 0.0, 1e9, blocks, (("blocks.0", 0), ("blocks.1", 1))
    )
    first = one[0], other[0]
    start = Solution(first, simulate(profile, first), 0.0)
    budget = simulate(profile, (one[1], other[1])).peak
    timeline = Timeline(profile)
    assert local_search(timeline, [start], budget).candidates == first
    assert anneal(timeline, start, budget).candidates == (one[1], other[1])
