"""A simulation of a step that judges schedules, and random steps to judge.

It shares nothing with the code that makes schedules: a device, a link out and a link back, each
doing one thing after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hypothesis import strategies as st

from rekindle.offload.schedule import ActivationTimes, LinkRates, Schedule, make_schedule

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
