"""What is chosen to go fits behind the device's work, and comes back in time.

The judge is a simulation of a step that shares nothing with the code that chooses: a device, a link
out and a link back, each doing one thing after another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

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

LITTLE = 1e-6


@dataclass(frozen=True)
class Made:
    """A step as it was measured."""

    entries: list[ActivationTimes]
    order: list[int]
    link: LinkRates

    @property
    def sizes(self) -> list[int]:
        return [entry.nbytes for entry in self.entries]


@dataclass(frozen=True)
class Run:
    """How a step went."""

    waited_out: float
    """Seconds that the device waited for memory to be let go."""
    waited_in: float
    """Seconds that it waited for what it was about to use."""
    peak: int
    misses: int


class Step:
    """One step, moment by moment; the device's clock stands still only when it waits for a link."""

    def __init__(self, made: Made, schedule: Schedule, link: LinkRates, ceiling: float) -> None:
        self.made, self.schedule, self.link, self.ceiling = made, schedule, link, ceiling
        self.waited_out = self.waited_in = 0.0
        self.here = self.peak = self.misses = 0
        self.out_is_free_at = self.back_is_free_at = 0.0
        self.leaving: list[tuple[float, int]] = []
        self.out_at: dict[int, float] = {}
        self.back_at: dict[int, float] = {}
        self.wanted: list[int] = []

    def now(self, work: float) -> float:
        return work + self.waited_out + self.waited_in

    def save(self, i: int) -> None:
        entry = self.made.entries[i]
        assert entry.saved_at is not None
        now = self.now(entry.saved_at)
        while self.leaving and self.leaving[0][0] <= now:
            self.here -= self.leaving.pop(0)[1]
        self.here += entry.nbytes
        if i in self.schedule.moved:
            self.out_is_free_at = max(self.out_is_free_at, now) + entry.nbytes / self.link.out
            self.out_at[i] = self.out_is_free_at
            self.leaving.append((self.out_is_free_at, entry.nbytes))
        while self.leaving and self.here > self.ceiling:
            self.wait_for_the_first_to_leave(entry.saved_at)
        self.peak = max(self.peak, self.here)

    def wait_for_the_first_to_leave(self, work: float) -> None:
        out_at, nbytes = self.leaving.pop(0)
        self.waited_out += max(0.0, out_at - self.now(work))
        self.here -= nbytes

    def use(self, position: int) -> None:
        i = self.made.order[position]
        used_at = self.made.entries[i].used_at
        assert used_at is not None
        while self.leaving:
            self.wait_for_the_first_to_leave(used_at)
        if position:  # what was used before is not needed any more
            self.here -= self.made.sizes[self.made.order[position - 1]]
        now = self.now(used_at)
        self.wanted += self.schedule.prefetch_at.get(position, ())
        if i in self.schedule.moved and i not in self.back_at:
            self.misses += 1
            self.fetch(i, now)
        while self.wanted:
            first = self.wanted[0]
            if first not in self.back_at:
                if self.here + self.made.sizes[first] > self.ceiling:
                    break
                self.fetch(first, now)
            self.wanted.pop(0)
        if i in self.schedule.moved:
            self.waited_in += max(0.0, self.back_at[i] - now)
        self.peak = max(self.peak, self.here)

    def fetch(self, i: int, now: float) -> None:
        nbytes = self.made.sizes[i]
        self.here += nbytes
        self.back_is_free_at = max(self.back_is_free_at, now) + nbytes / self.link.back
        self.back_at[i] = self.back_is_free_at


def simulate(
    made: Made, schedule: Schedule, *, link: LinkRates | None = None, ceiling: float | None = None
) -> Run:
    """Run a step; with another link than was measured, or another ceiling than was chosen."""
    step = Step(made, schedule, link or made.link, schedule.ceiling if ceiling is None else ceiling)
    for i in range(len(made.entries)):
        step.save(i)
    for position in range(len(made.order)):
        step.use(position)
    return Run(step.waited_out, step.waited_in, step.peak, step.misses)


def made_of(
    sizes: Sequence[int],
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    before_turn: float = 0.0,
    out: float = 4.0,
    back: float = 4.0,
    order: Sequence[int] | None = None,
    stays: Sequence[int] = (),
) -> Made:
    """A step whose ops all take the same time, and whose last activation is used first."""
    order = list(reversed(range(len(sizes)))) if order is None else list(order)
    turn = forward * max(len(sizes) - 1, 0) + before_turn
    used_at = {i: turn + backward * position for position, i in enumerate(order)}
    entries = [
        ActivationTimes(nbytes, i in stays, forward * i, used_at.get(i))
        for i, nbytes in enumerate(sizes)
    ]
    return Made(entries, order, LinkRates(out, back))


@st.composite
def steps(
    draw: st.DrawFn,
    *,
    reversed_order: bool = False,
    equal_sizes: bool = False,
    all_used: bool = False,
    some_used: bool = False,
    may_stay: bool = True,
) -> Made:
    """Any step: sizes, times, who uses what when, and how fast the links are."""
    count = draw(st.integers(0, 12))
    gaps = st.lists(st.integers(0, 8), min_size=count, max_size=count)
    if equal_sizes:
        sizes = [draw(st.integers(1, 20))] * count
    else:
        sizes = draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    saved_at = list(accumulate(draw(gaps)))
    order = list(reversed(range(count)))
    if not reversed_order:
        order = draw(st.permutations(order))
    if not all_used:
        order = order[: draw(st.integers(min(count, 1) if some_used else 0, count))]
    turn = (saved_at[-1] if saved_at else 0) + draw(st.integers(0, 8))
    used_at = dict(zip(order, accumulate([turn, *draw(gaps)]), strict=False))
    stays = draw(st.sets(st.integers(0, max(count - 1, 0)))) if may_stay else set()
    entries = [
        ActivationTimes(
            nbytes,
            i in stays,
            float(saved_at[i]),
            float(used_at[i]) if i in used_at else None,
        )
        for i, nbytes in enumerate(sizes)
    ]
    rates = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0])
    return Made(entries, order, LinkRates(draw(rates), draw(rates)))


quotas = st.one_of(st.none(), st.integers(0, 300), st.floats(0.0, 1.0))
known_links = st.booleans()


def choice_of(made: Made, quota: float | None, knows_link: bool = True) -> Schedule:
    return make_schedule(made.entries, made.order, quota, made.link if knows_link else None)


def bytes_moved(made: Made, schedule: Schedule) -> int:
    return sum(made.sizes[i] for i in schedule.moved)


def twice_a_large_one(sizes: Sequence[int]) -> int:
    """The lead: twice the size at the ninetieth percentile."""
    return 2 * sorted(sizes)[9 * (len(sizes) - 1) // 10] if sizes else 0


def wanted_first(made: Made) -> set[int]:
    """What backward uses until as much as the lead is used."""
    found, total = set(), 0
    for i in made.order:
        if total >= twice_a_large_one(made.sizes):
            break
        found.add(i)
        total += made.sizes[i]
    return found


def peak_of_forward(made: Made, schedule: Schedule) -> int:
    """The most bytes that are there when something is saved; what leaves just then still counts."""
    out_is_free_at, out_at = 0.0, {}
    for i in sorted(schedule.moved):
        begin = max(out_is_free_at, made.entries[i].saved_at or 0.0)
        out_at[i] = out_is_free_at = begin + made.sizes[i] / (0.95 * made.link.out)
    saved_at = [entry.saved_at or 0.0 for entry in made.entries]
    return max(
        (
            sum(
                nbytes
                for i, nbytes in enumerate(made.sizes)
                if saved_at[i] <= now <= out_at.get(i, now)
            )
            for now in saved_at
        ),
        default=0,
    )


def has_no_room_in_time(made: Made, schedule: Schedule) -> list[int]:
    """What cannot come below the ceiling while that is used which is used before it."""
    kept = sum(made.sizes) - bytes_moved(made, schedule)
    found = []
    for before, i in pairwise(made.order):
        here = kept + (made.sizes[before] if before in schedule.moved else 0)
        if i in schedule.moved and here + made.sizes[i] > schedule.ceiling:
            found.append(i)
        kept -= 0 if before in schedule.moved else made.sizes[before]
    return found


# "auto": nobody waits


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


# What goes


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


# The ceiling


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


# When it is asked back


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


# Odd steps


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
