"""With quota="auto" nothing waits: what leaves is hidden behind the work of the device."""

from hypothesis import example, given

from rekindle.offload.schedule import LinkRates, Schedule
from tests.offload.simulated_step import LITTLE, Made, choice_of, made_of, simulate, steps


@given(steps(some_used=True))
def test_auto_has_everything_out_before_backward_and_back_before_its_use(made: Made) -> None:
    schedule = choice_of(made, None)
    run = simulate(made, schedule, ceiling=float("inf"))
    assert run.waited_out + run.waited_in < LITTLE


@given(steps(some_used=True))
def test_auto_hides_behind_compute_on_a_link_slower_by_the_margin(made: Made) -> None:
    schedule = choice_of(made, None)
    slower = LinkRates(0.95 * made.link.out, 0.95 * made.link.back)
    run = simulate(made, schedule, link=slower, ceiling=float("inf"))
    assert run.waited_out + run.waited_in < LITTLE


@given(steps(some_used=True))
@example(made_of([8] * 6, before_turn=1.9))
def test_auto_never_waits_for_copies_out_to_stay_below_its_ceiling(made: Made) -> None:
    run = simulate(made, choice_of(made, None))
    assert run.waited_out < LITTLE


@given(steps(some_used=True))
@example(made_of([10, 10, 10, 6], forward=10.0, stays=[0]))
def test_auto_never_waits_for_what_it_uses_below_its_ceiling(made: Made) -> None:
    run = simulate(made, choice_of(made, None))
    assert run.waited_in < LITTLE


@given(steps(reversed_order=True, equal_sizes=True, all_used=True, may_stay=False))
@example(made_of([8] * 6, before_turn=1.9))
def test_auto_never_waits_in_a_stack_of_equal_layers(made: Made) -> None:
    run = simulate(made, choice_of(made, None))
    assert run.waited_out + run.waited_in < LITTLE


@given(steps(all_used=True))
@example(made_of([10, 10, 10, 6], forward=10.0, stays=[0]))
def test_auto_never_misses_a_prefetch(made: Made) -> None:
    assert simulate(made, choice_of(made, None)).misses == 0


def test_auto_moves_all_that_may_go_where_the_link_is_fast() -> None:
    made = made_of([8] * 10, out=1000.0, back=1000.0)
    assert choice_of(made, None).moved == set(range(8))


def test_auto_fills_the_link_out_until_backward_begins() -> None:
    made = made_of([8] * 20, forward=1.0, before_turn=1.0, out=4.0, back=4.0)
    # 20 seconds of forward at 0.95 * 4 bytes a second are 76 bytes: nine and a half.
    assert choice_of(made, None).moved == set(range(9))


def test_auto_moves_nothing_over_a_link_that_is_too_slow_for_a_single_copy() -> None:
    made = made_of([8] * 10, out=0.1)
    assert choice_of(made, None).moved == frozenset()


def test_auto_keeps_what_cannot_be_back_in_time() -> None:
    made = made_of([8] * 20, forward=10.0, backward=1.0, out=4.0, back=1.0)
    # Used from second 190 on, one a second. The first use makes room, at 191; a copy back takes 8.4
    # seconds, so that one is back at 199.4, for the use at 200, and another at 207.8, for 208.
    assert choice_of(made, None).moved == {9, 1}


def test_auto_keeps_what_could_be_back_in_time_only_above_its_ceiling() -> None:
    # Used from second 90 on. From then on a copy back would take until 98.4, in time for the use
    # at 99; but there is no room until the first is used, at 91.
    made = made_of([8] * 10, forward=10.0, backward=1.0, out=4.0, back=1.0)
    assert choice_of(made, None) == Schedule(frozenset(), 80, {})


def test_one_large_activation_does_not_keep_all_the_small_ones() -> None:
    # A hundred activations of one, then the logits of a hundred; the link has time for all of them,
    # but there is no room for the last one beside the logits, and that is used next.
    made = made_of([1] * 100 + [100], out=1000.0, back=1000.0)
    assert choice_of(made, None).moved == set(range(99))


def test_auto_asks_for_everything_before_times_are_known() -> None:
    made = made_of([8] * 10, out=0.1)
    assert choice_of(made, None, knows_link=False).moved == set(range(8))
