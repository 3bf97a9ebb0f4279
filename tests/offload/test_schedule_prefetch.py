"""When a schedule prefetches each activation."""

from hypothesis import example, given
from hypothesis import strategies as st

from rekindle.offload.schedule import prefetch_ahead
from tests.offload.simulated_step import (
    LITTLE,
    Made,
    bytes_moved,
    choice_of,
    known_links,
    made_of,
    quotas,
    simulate,
    steps,
    twice_a_large_one,
)


@given(steps(), quotas, known_links)
def test_what_moved_and_is_used_is_asked_back_once(
    made: Made, quota: float | None, knows_link: bool
) -> None:
    schedule = choice_of(made, quota, knows_link)
    asked = [i for found in schedule.prefetch_at.values() for i in found]
    assert sorted(asked) == sorted(i for i in made.order if i in schedule.moved)


@given(steps(), quotas, known_links)
def test_nothing_is_asked_back_after_its_use(
    made: Made, quota: float | None, knows_link: bool
) -> None:
    schedule = choice_of(made, quota, knows_link)
    for use, found in schedule.prefetch_at.items():
        assert all(use <= made.order.index(i) for i in found)


@given(steps(), quotas, known_links)
@example(made_of([1, 1, 2]), 1.0, False)
@example(made_of([4] * 3 + [40] + [4] * 12), 52, False)
def test_what_moved_is_asked_back_a_use_before_its_own(
    made: Made, quota: float | None, knows_link: bool
) -> None:
    schedule = choice_of(made, quota, knows_link)
    for use, found in schedule.prefetch_at.items():
        assert all(use < made.order.index(i) for i in found)


@given(steps(), quotas, known_links)
def test_all_is_asked_back_in_the_order_of_use(
    made: Made, quota: float | None, knows_link: bool
) -> None:
    schedule = choice_of(made, quota, knows_link)
    asked = [i for use in sorted(schedule.prefetch_at) for i in schedule.prefetch_at[use]]
    assert asked == [i for i in made.order if i in schedule.moved]


@given(
    st.lists(st.integers(1, 20), max_size=15).flatmap(
        lambda sizes: st.tuples(
            st.just(sizes),
            st.permutations(range(len(sizes))),
            st.sets(st.integers(0, max(len(sizes) - 1, 0))),
        )
    )
)
def test_fetching_ahead_has_no_more_than_the_lead_on_the_way(
    drawn: tuple[list[int], list[int], set[int]],
) -> None:
    sizes, order, moved = drawn
    prefetch_at = prefetch_ahead(sizes, order, frozenset(moved))
    on_the_way: set[int] = set()
    for use, i in enumerate(order):
        on_the_way |= set(prefetch_at.get(use, ()))
        is_alone = on_the_way <= set(order[use : use + 2])
        assert is_alone or sum(sizes[k] for k in on_the_way) <= twice_a_large_one(sizes)
        on_the_way.discard(i)
    assert not on_the_way


def test_fetching_ahead_keeps_two_of_equal_size_on_the_way() -> None:
    prefetch_at = prefetch_ahead([5] * 6, [5, 4, 3, 2, 1, 0], frozenset(range(6)))
    assert prefetch_at == {0: (5, 4), 1: (3,), 2: (2,), 3: (1,), 4: (0,)}


def test_fetching_ahead_does_not_ask_at_once_for_what_is_used_last() -> None:
    # Only the first two of a hundred went: there are 98 uses to go before they are wanted.
    prefetch_at = prefetch_ahead([5] * 100, list(reversed(range(100))), frozenset({0, 1}))
    assert min(prefetch_at) >= 90


@given(steps(reversed_order=True, equal_sizes=True, all_used=True, may_stay=False))
def test_what_is_asked_back_in_time_is_there_at_its_use(made: Made) -> None:
    run = simulate(made, choice_of(made, None), ceiling=float("inf"))
    assert run.misses == 0
    assert run.waited_in < LITTLE


def test_what_is_asked_back_in_time_is_asked_two_copies_before_its_use() -> None:
    made = made_of([4] * 12, forward=10.0, backward=1.0, out=4.0, back=4.0)
    schedule = choice_of(made, 12)
    # A copy takes a little more than a use; it and one to spare make three uses, rounded up.
    assert {
        i: made.order.index(i) - use for use, found in schedule.prefetch_at.items() for i in found
    } == {
        0: 3,
        1: 3,
        2: 3,
    }


def test_one_large_activation_does_not_make_small_ones_come_back_early() -> None:
    # Ten small ones go; to copy one takes a tenth of a use. The large one stays.
    made = made_of([1] * 300 + [100], backward=1.0, out=10.0, back=10.0)
    schedule = choice_of(made, 10)
    assert schedule.moved == set(range(10))
    early = {
        made.order.index(i) - use for use, found in schedule.prefetch_at.items() for i in found
    }
    assert early == {1}


@given(steps(), quotas)
def test_a_quota_over_a_slow_link_costs_no_more_than_all_copies_one_after_another(
    made: Made, quota: float | None
) -> None:
    schedule = choice_of(made, quota)
    run = simulate(made, schedule)
    moved = bytes_moved(made, schedule)
    assert run.waited_out <= moved / made.link.out + LITTLE
    assert run.waited_in <= moved / made.link.back + LITTLE
