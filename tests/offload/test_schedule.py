"""Which activations a schedule moves, and its ceiling."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rekindle.offload.schedule import (
    ActivationTimes,
    LinkRates,
    Schedule,
    bytes_in_flight,
    make_schedule,
    prefetch_ahead,
)
from tests.offload.simulated_step import (
    Made,
    bytes_moved,
    choice_of,
    has_no_room_in_time,
    known_links,
    made_of,
    peak_of_forward,
    quotas,
    simulate,
    steps,
    twice_a_large_one,
    wanted_first,
)


@given(steps(), quotas, known_links)
def test_what_somebody_holds_never_goes(made: Made, quota: float | None, knows_link: bool) -> None:
    moved = choice_of(made, quota, knows_link).moved
    assert not any(made.entries[i].stays for i in moved)


@given(steps(), quotas, known_links)
def test_what_backward_wants_first_never_goes(
    made: Made, quota: float | None, knows_link: bool
) -> None:
    assert not choice_of(made, quota, knows_link).moved & wanted_first(made)


def earliest(made: Made, fits: Callable[[int], bool]) -> set[int]:
    """The longest run of activations, from the first that may go on, that fits."""
    found, total = set(), 0
    for i, entry in enumerate(made.entries):
        if not entry.stays and i not in wanted_first(made):
            total += entry.nbytes
            if not fits(total):
                break
            found.add(i)
    return found


@given(steps(), st.integers(0, 300), known_links)
def test_a_quota_in_bytes_moves_the_earliest_that_fit_in_it(
    made: Made, quota: int, knows_link: bool
) -> None:
    schedule = choice_of(made, quota, knows_link)
    assert schedule.moved == earliest(made, lambda total: total <= quota)


@given(steps(), st.integers(0, 8), known_links)
def test_a_share_moves_the_earliest_that_fit_in_it(
    made: Made, eighths: int, knows_link: bool
) -> None:
    # Of sizes that eight divides, an eighth is a whole number of bytes.
    made = replace(made, entries=[replace(e, nbytes=8 * e.nbytes) for e in made.entries])
    schedule = choice_of(made, eighths / 8, knows_link)
    movable = sum(entry.nbytes for entry in made.entries if not entry.stays)
    assert schedule.moved == earliest(made, lambda total: 8 * total <= eighths * movable)


def test_a_share_that_is_no_binary_fraction_is_still_exact() -> None:
    made = made_of([1] * 100)
    moved = {percent: len(choice_of(made, percent / 100).moved) for percent in range(98)}
    assert moved == {percent: percent for percent in range(98)}


@given(steps(), st.integers(0, 300), st.integers(0, 300))
def test_a_larger_quota_in_bytes_moves_no_other_and_no_less(made: Made, a: int, b: int) -> None:
    assert choice_of(made, min(a, b)).moved <= choice_of(made, max(a, b)).moved


@given(steps(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_larger_share_moves_no_other_and_no_less(made: Made, a: float, b: float) -> None:
    assert choice_of(made, min(a, b)).moved <= choice_of(made, max(a, b)).moved


@given(steps(), known_links)
def test_the_whole_share_moves_all_that_may_go(made: Made, knows_link: bool) -> None:
    may_go = {i for i, entry in enumerate(made.entries) if not entry.stays} - wanted_first(made)
    assert choice_of(made, 1.0, knows_link).moved == may_go


@given(steps(), known_links)
def test_a_quota_of_nothing_moves_nothing(made: Made, knows_link: bool) -> None:
    assert choice_of(made, 0, knows_link).moved == frozenset()
    assert choice_of(made, 0.0, knows_link).moved == frozenset()


@given(steps())
def test_auto_moves_no_more_than_the_whole_share(made: Made) -> None:
    assert choice_of(made, None).moved <= choice_of(made, 1.0).moved


def ceiling_without_times(made: Made, schedule: Schedule) -> int:
    kept = sum(made.sizes) - bytes_moved(made, schedule)
    largest = max((made.sizes[i] for i in schedule.moved), default=0)
    return max(kept, twice_a_large_one(made.sizes), largest)


@given(steps(), st.one_of(st.integers(0, 300), st.floats(0.0, 1.0)), known_links)
def test_the_ceiling_with_a_quota_is_what_stays_or_the_lead_or_the_largest_that_moves(
    made: Made, quota: float, knows_link: bool
) -> None:
    schedule = choice_of(made, quota, knows_link)
    assert schedule.ceiling == ceiling_without_times(made, schedule)


@given(steps())
def test_the_ceiling_of_auto_without_times_is_that_of_the_whole_share(made: Made) -> None:
    schedule = choice_of(made, None, knows_link=False)
    assert schedule == choice_of(made, 1.0, knows_link=False)
    assert schedule.ceiling == ceiling_without_times(made, schedule)


@given(steps(some_used=True))
def test_the_ceiling_of_auto_is_no_lower_than_the_peak_of_a_forward_that_never_waits(
    made: Made,
) -> None:
    schedule = choice_of(made, None)
    peak = peak_of_forward(made, schedule)
    assert schedule.ceiling == max(ceiling_without_times(made, schedule), peak)


def test_one_large_activation_that_stays_counts_once_in_the_ceiling() -> None:
    made = made_of([1] * 100 + [100])
    assert choice_of(made, 1.0).ceiling == 100


def test_one_large_activation_that_moves_has_room() -> None:
    made = made_of([1] * 50 + [100] + [1] * 50)
    assert choice_of(made, 1.0).ceiling == 100


@given(steps(equal_sizes=True), quotas)
def test_a_step_of_equal_activations_stays_below_its_ceiling(
    made: Made, quota: float | None
) -> None:
    schedule = choice_of(made, quota)
    assert simulate(made, schedule).peak <= schedule.ceiling


@given(steps(), quotas)
def test_a_step_without_misses_stays_below_its_ceiling(made: Made, quota: float | None) -> None:
    schedule = choice_of(made, quota)
    run = simulate(made, schedule)
    assume(not run.misses)
    assert run.peak <= schedule.ceiling


@given(steps(all_used=True, may_stay=False), quotas)
@example(made_of([1, 3, 1, 3, 1, 1], order=[5, 4, 3, 1, 2, 0]), 4)
@example(made_of([1] * 5 + [10]), 1.0)
def test_a_step_with_a_quota_misses_only_what_has_no_room_below_its_ceiling(
    made: Made, quota: float | None
) -> None:
    schedule = choice_of(made, quota)
    assert simulate(made, schedule).misses == len(has_no_room_in_time(made, schedule))


@given(steps(equal_sizes=True), quotas)
def test_a_step_of_equal_activations_never_misses_a_prefetch(
    made: Made, quota: float | None
) -> None:
    assert simulate(made, choice_of(made, quota)).misses == 0


@pytest.mark.parametrize("quota", [None, 0, 100, 0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "link", [None, LinkRates(0.0, 0.0), LinkRates(1.0, 0.0), LinkRates(1.0, 1.0)]
)
def test_a_step_without_activations_is_an_empty_choice(
    quota: float | None, link: LinkRates | None
) -> None:
    assert make_schedule([], [], quota, link) == Schedule(frozenset(), 0, {})


@pytest.mark.parametrize("quota", [None, 100, 1.0])
@pytest.mark.parametrize("count", [1, 2])
def test_the_only_one_or_two_stay(quota: float | None, count: int) -> None:
    made = made_of([8] * count, out=100.0, back=100.0)
    assert choice_of(made, quota) == Schedule(frozenset(), 16, {})


@pytest.mark.parametrize("knows_link", [False, True])
def test_what_backward_never_uses_goes_and_is_never_asked_back(knows_link: bool) -> None:
    made = made_of([8] * 4, order=[], out=100.0)
    schedule = choice_of(made, None, knows_link)
    assert schedule == Schedule(frozenset(range(4)), 16, {})


def test_without_a_rate_auto_moves_all_that_may_go() -> None:
    made = replace(made_of([8] * 5), link=LinkRates(0.0, 0.0))
    schedule = choice_of(made, None)
    assert schedule.moved == {0, 1, 2}
    assert schedule.prefetch_at == prefetch_ahead(made.sizes, made.order, schedule.moved)


def test_without_a_rate_back_the_rate_out_is_counted_on() -> None:
    made = made_of([8] * 10, forward=10.0, backward=1.0, out=1.0, back=1.0)
    unknown = replace(made, link=LinkRates(1.0, 0.0))
    assert choice_of(unknown, None).moved == choice_of(made, None).moved


@given(steps(), quotas)
def test_a_link_without_a_rate_back_still_gets_everything_back(
    made: Made, quota: float | None
) -> None:
    schedule = make_schedule(made.entries, made.order, quota, LinkRates(made.link.out, 0.0))
    asked = [i for use in sorted(schedule.prefetch_at) for i in schedule.prefetch_at[use]]
    assert asked == [i for i in made.order if i in schedule.moved]


def test_where_all_happens_at_one_moment_auto_moves_nothing() -> None:
    made = made_of([8] * 10, forward=0.0, backward=0.0)
    assert choice_of(made, None) == Schedule(frozenset(), 80, {})


def test_where_all_is_used_at_one_moment_all_is_asked_back_at_the_first_use() -> None:
    made = made_of([8] * 5, forward=0.0, backward=0.0)
    assert choice_of(made, 1.0).prefetch_at == {0: (2, 1, 0)}


def test_the_lead_of_nothing_is_nothing() -> None:
    assert bytes_in_flight([]) == 0


@given(st.lists(st.integers(1, 100), max_size=50))
def test_the_lead_is_twice_the_size_at_the_ninetieth_percentile(sizes: list[int]) -> None:
    assert bytes_in_flight(sizes) == twice_a_large_one(sizes)


@pytest.mark.parametrize(
    ("sizes", "lead"),
    [
        ([7], 14),
        ([1, 2], 2),
        ([8] * 10, 16),
        ([100] + [1] * 10, 2),
        ([100, 100] + [1] * 9, 200),
        ([1] * 100 + [100] * 12, 2),
        ([1] * 100 + [100] * 13, 200),
    ],
)
def test_a_few_that_are_far_larger_do_not_count_in_the_lead(sizes: list[int], lead: int) -> None:
    assert bytes_in_flight(sizes) == lead


@given(steps(), quotas, known_links)
def test_the_same_measurements_give_the_same_choice(
    made: Made, quota: float | None, knows_link: bool
) -> None:
    assert choice_of(made, quota, knows_link) == choice_of(made, quota, knows_link)


@given(steps(), quotas, st.integers(1, 6))
def test_the_unit_of_time_does_not_matter(made: Made, quota: float | None, power: int) -> None:
    slower = 2.0**power
    entries = [
        replace(
            entry,
            saved_at=None if entry.saved_at is None else entry.saved_at * slower,
            used_at=None if entry.used_at is None else entry.used_at * slower,
        )
        for entry in made.entries
    ]
    link = LinkRates(made.link.out / slower, made.link.back / slower)
    assert make_schedule(entries, made.order, quota, link) == choice_of(made, quota)


def test_what_is_not_limited_may_be_in_flight_as_long_as_it_takes() -> None:
    entries = [ActivationTimes(8, saved_at=float(i), used_at=16.0 - 2 * i) for i in range(4)]
    order, link = [3, 2, 1, 0], LinkRates(out=4.1 / 0.95, back=4.1 / 0.95)  # 1.95 s for each
    limited = make_schedule(entries, order, 1.0, link)
    unlimited = make_schedule(entries, order, 1.0, link, limit_in_flight=False)
    assert sorted(limited.moved) == sorted(unlimited.moved) == [0, 1]
    # The first has left when the third is saved, the second when the fifth would be.
    assert (limited.ceiling, unlimited.ceiling) == (16, 24 + 16)
    assert unlimited.forward_ceilings == (8 + 16, 16 + 16, 16 + 16, 24 + 16)  # two may be late
