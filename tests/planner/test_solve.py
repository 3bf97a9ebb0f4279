"""The solver, on profiles written by hand: against every choice there is."""

import itertools
import random
import re
from dataclasses import replace
from functools import cache

import pytest

import rekindle
from rekindle.planner.solve.local_search import anneal, local_search
from rekindle.planner.solve.solver import choose, least_peak
from rekindle.planner.timeline import Timeline, simulate
from rekindle.planner.types import BlockProfile, Candidate, Prediction, Profile, Solution
from rekindle.sizes import parse_bytes
from rekindle.strategy import Keep, NumberedOps, Recompute, Selective, Strategy

pytest.importorskip("scipy")

KIB, MIB, GIB = 2**10, 2**20, 2**30
GAP = 1e-3
"""A share of the time: more than HiGHS is asked for, less than anybody would notice."""
LINK_GAP = 0.04
"""With a link, the solver's view of the step is rough, and its answer is improved step by step."""


WHOLE: dict[str, Strategy] = {"keep": Keep(), "recompute": Recompute()}
MOVE_ONE = Selective(NumberedOps(offloaded=(1,)))


def random_option(
    draw: random.Random, fate: str, size: int, second: float, link: bool
) -> Candidate:
    """More held, less to run again; what is moved is not held."""
    share = {"keep": 1.0, "recompute": 0.1}.get(fate) or draw.uniform(0.15, 0.9)
    held = int(share * size)
    moved = int(draw.uniform(0.2, 0.9) * held) if link and fate == "select" else 0
    forward = second * draw.uniform(1, 1.3)
    results = {"offloaded" if moved else "kept": (1, 2)}
    return Candidate(
        Selective(NumberedOps(**results)) if fate == "select" else WHOLE[fate],
        bytes_held=held - moved,
        bytes_moved=moved,
        largest_moved=moved // 2,
        forward_seconds=forward,
        backward_seconds=2 * forward + (1 - share) * second * draw.uniform(0.5, 1.5),
        forward_peak=int(held * draw.uniform(1, 1.4)),
        backward_peak=int(size * draw.uniform(0.2, 1.2)),
    )


@cache
def random_profile(
    seed: int,
    *,
    kinds: int = 2,
    blocks: int = 5,
    link: bool = True,
    unit: int = MIB,
    second: float = 1e-3,
) -> Profile:
    """Kinds of blocks in any order, with menus of four; link: an option moves some bytes."""
    draw = random.Random(seed)
    known = []
    for name in ("Left", "Right")[:kinds]:
        size = int(draw.uniform(50, 150) * unit)
        fates = [("keep", False), ("recompute", False), ("select", False), ("select", link)]
        menu = tuple(random_option(draw, fate, size, second, moves) for fate, moves in fates)
        known.append(BlockProfile(name, name, menu))
    order = tuple((f"blocks.{i}", draw.randrange(kinds)) for i in range(blocks))
    return Profile(
        model="Toy",
        device="none",
        batch="a batch",
        static_bytes=int(draw.uniform(0, 300) * unit),
        before_bytes=int(draw.uniform(0, 30) * unit),
        rest_peak=int(draw.uniform(0, 200) * unit),
        rest_seconds=second,
        bytes_per_second=100 * unit / second / 3 if link else 0.0,
        blocks=tuple(known),
        order=order,
    )


def layers(count: int, kinds: int = 1) -> Profile:
    """The layers of a large model, with menus as long as one that was measured."""
    known = tuple(
        BlockProfile(f"Layer{i}", f"Layer{i}", long_menu((1.7 - 0.4 * i) * GIB))
        for i in range(kinds)
    )
    order = tuple((f"layers.{i}", i % kinds) for i in range(count))
    return Profile("Llama", "none", "a batch", 0, 64 * MIB, GIB, 5e-3, 55e9, known, order)


def long_menu(size: float) -> tuple[Candidate, ...]:
    shares = (1.0, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
    menu = [
        Candidate(
            Keep() if share == 1 else Recompute() if share == 0.1 else Selective(NumberedOps((1,))),
            bytes_held=int(share * size),
            forward_seconds=8e-3,
            backward_seconds=16e-3 + (1 - share) ** 2 * 7.7e-3,
            forward_peak=int((share + 0.1) * size),
            backward_peak=int((1.3 - share) * size),
        )
        for share in shares
    ]
    menu += [
        replace(
            o,
            strategy=MOVE_ONE,
            bytes_held=o.bytes_held // 9,
            bytes_moved=8 * o.bytes_held // 9,
        )
        for o in menu
        if isinstance(o.strategy, Selective)
    ]
    return tuple(menu)


@cache
def all_choices(profile: Profile) -> list[Prediction]:
    """The predictions of every choice there is. Several tests look at the same profiles."""
    menus = [profile.candidates(i) for i in range(len(profile.order))]
    return [simulate(profile, options) for options in itertools.product(*menus)]


BUDGETS = 8


def budgets(choices: list[Prediction]) -> list[int]:
    """From the lowest peak there is to the highest; the same for every test, to solve each once."""
    peaks = sorted({choice.peak for choice in choices})
    return [peaks[i * (len(peaks) - 1) // (BUDGETS - 1)] for i in range(BUDGETS)]


def fastest(choices: list[Prediction], budget: int) -> float:
    return min(choice.seconds for choice in choices if choice.peak <= budget)


@cache
def chosen(profile: Profile, budget: int) -> Solution:
    """The solver's choice, of which several tests check one property each."""
    choice = choose(profile, budget)
    assert choice is not None, "something fits"
    return choice


SEEDS = range(8)
every_profile = pytest.mark.parametrize("seed", SEEDS)
of_one_kind_and_of_two = pytest.mark.parametrize("kinds", [1, 2], ids=["one kind", "two kinds"])
with_and_without_a_link = pytest.mark.parametrize("link", [True, False], ids=["link", "no link"])
SCALES = {
    "a large model": (16 * MIB, 1e-1),
    "a usual model": (MIB, 1e-3),
    "a toy": (KIB, 1e-5),
    "a toy's toy": (7, 1e-6),  # contrived: so small that a solver's tolerances would show
}
every_scale = pytest.mark.parametrize(("unit", "second"), SCALES.values(), ids=SCALES)


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
    assert str(refused.value).endswith(f"the peak is in {least.prediction.at}.")


def test_with_room_for_all_the_fastest_is_taken() -> None:
    profile = random_profile(1, link=False)
    best = [min(profile.candidates(i), key=lambda o: o.seconds) for i in range(len(profile.order))]
    assert chosen(profile, 100 * GIB).prediction.seconds == simulate(profile, best).seconds


def test_of_options_that_take_the_same_time_the_one_that_holds_less_is_taken() -> None:
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
