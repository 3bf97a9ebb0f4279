"""The integer program: a candidate for each block, so that no moment of the step is above a budget.

A multiple-choice knapsack whose rows are the timeline's own moments, solved by HiGHS. In a model
whose blocks are all alike, those that follow each other are a run: one integer counts how many of
them have each candidate, so that the program has one size for any number of layers. Where blocks
differ, each is a run of one: runs of several were tried there, and led to slower plans, because the
local search got a start with fewer orders in it.

The rows are exact as long as nothing moves, but for two things. In a run of several blocks, those
whose backward needs most come first, so that it is on top of the fewest others: the best order for
the backward, of two neighbours the other one adds what both hold to the larger need; the forward
might prefer another. And what is made between the blocks of a run counts from its start. Where
candidates move results, the program has a rough view of the link: at each moment as much is on its
way as the most that any block moves, the device waits for the copies that take longer than all its
work, and never for the host. The local search, which has the timeline itself, makes up for that.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from rekindle.planner.timeline import Moment, Terms, Timeline
from rekindle.planner.types import Candidate, Solution

_MIB = 2**20


class Effort(NamedTuple):
    """When HiGHS stops."""

    seconds: float
    gap: float
    """How far from the best an answer may be, as a share."""


EXACT = Effort(2.0, 5e-4)
ROUGH = Effort(1.5, 2e-3)
"""Where the answer is improved afterwards anyway."""
_RUN_GAP = 1e-6
"""The gap where runs are counted: programs so small are solved to the end."""

_Sum = list[tuple[int, float]]
"""Columns with their factors."""


@dataclass(frozen=True)
class _Run:
    """Places of alike blocks that follow each other, with the columns of their candidates."""

    start: int
    stop: int
    menu: tuple[int, ...]
    """Indices of the candidates, those whose backward needs most first."""
    counts: int
    """The first column of those that count blocks, by candidate."""
    uses: int
    """The first column of those that say whether any block has a candidate."""

    @property
    def length(self) -> int:
        return self.stop - self.start


class _Program:
    """Columns with costs and rows `lower <= row . x <= upper`, put together one by one."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self._limits: list[float] = []
        self._integral: list[bool] = []
        self._entries: list[tuple[int, int, float]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []

    def add_column(self, limit: float = np.inf, *, integral: bool = False) -> int:
        """Return a new column, from 0 to a limit."""
        self.costs.append(0.0)
        self._limits.append(limit)
        self._integral.append(integral)
        return len(self.costs) - 1

    def add_row(self, terms: _Sum, lower: float, upper: float) -> None:
        """Bound a sum."""
        row = len(self._lower)
        self._entries += [(row, column, factor) for column, factor in terms]
        self._lower.append(lower)
        self._upper.append(upper)

    def solve(self, effort: Effort) -> "tuple[list[float], float] | None":
        """The values of the columns, and how far from the best they are; None if there are none."""
        rows, columns, factors = zip(*self._entries, strict=True)
        shape = len(self._lower), len(self.costs)
        matrix = coo_array((factors, (rows, columns)), shape=shape).tocsr()
        result = milp(
            np.array(self.costs),
            constraints=LinearConstraint(matrix, self._lower, self._upper),
            integrality=np.array(self._integral, dtype=int),
            bounds=Bounds(0, self._limits),
            options={"time_limit": effort.seconds, "mip_rel_gap": effort.gap},
        )
        if result.x is None:
            return None
        return list(result.x), float(result.mip_gap or 0.0)


class _Rows:
    """The rows of one timeline's program."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.program = _Program()
        self.runs = [self._run(start, stop) for start, stop in _runs(timeline)]
        self._run_of = {i: run for run in self.runs for i in range(run.start, run.stop)}
        self._left = {0: list[tuple[int, float]]()}
        """By a place where a run ends: a column for the bytes that all blocks before it leave."""
        for run in self.runs:
            self._add_run(run)
        self._tie_calls()
        moving = [r for r in self.runs if any(self._term(r, k).moved for k in r.menu)]
        self.in_flight: _Sum = [(self.program.add_column(), 1.0)] if moving else []
        for run in moving:
            for j, k in enumerate(run.menu):
                moved = self._term(run, k).moved / _MIB
                if moved:
                    self.program.add_row([*self.in_flight, (run.uses + j, -moved)], 0, np.inf)

    def _run(self, start: int, stop: int) -> _Run:
        terms, program = self.timeline.terms[start], self.program
        order = sorted(range(len(terms)), key=lambda k: (-terms[k].backward_peak, -terms[k].moved))
        count = stop - start
        columns = [program.add_column(count, integral=True) for _ in order]
        uses = columns
        if count > 1:
            uses = [program.add_column(1, integral=True) for _ in order]
        return _Run(start, stop, tuple(order), columns[0], uses[0])

    def _term(self, run: _Run, candidate: int) -> Terms:
        return self.timeline.terms[run.start][candidate]

    def _add_run(self, run: _Run) -> None:
        """One candidate for each block, and the sum of what is left when the run is over."""
        program, many = self.program, len(run.menu)
        counts = [(run.counts + j, 1.0) for j in range(many)]
        program.add_row(counts, run.length, run.length)
        if run.length > 1:
            for j in range(many):
                uses = [(run.uses + j, float(run.length)), (run.counts + j, -1.0)]
                program.add_row(uses, 0, np.inf)
        left = program.add_column()
        before = self._left[run.start]
        program.add_row([*before, *self._sum(run, "left", many), (left, -1.0)], 0, 0)
        self._left[run.stop] = [(left, 1.0)]

    def _sum(self, run: _Run, name: str, many: int) -> _Sum:
        """Bytes of a term over the blocks that have one of the first so many candidates."""
        terms = [
            (run.counts + j, getattr(self._term(run, k), name) / _MIB)
            for j, k in enumerate(run.menu[:many])
        ]
        return [(column, nbytes) for column, nbytes in terms if nbytes]

    def _tie_calls(self) -> None:
        """Calls of one block have one candidate."""
        first: dict[str, _Run] = {}
        for run in self.runs:
            other = first.setdefault(self.timeline.profile.order[run.start][0], run)
            if other is not run:
                where = {k: j for j, k in enumerate(other.menu)}
                for j, k in enumerate(run.menu):
                    same = [(run.counts + j, 1.0), (other.counts + where[k], -1.0)]
                    self.program.add_row(same, 0, 0)

    def moment_sums(self, moment: Moment) -> list[_Sum]:
        """The sums that memory at a moment is the largest of: one for each candidate of a run."""
        shared = [*self.in_flight, *self._waiting(moment)]
        if moment.place is None:
            left = self._left[moment.left_until] if moment.left_until else []
            return [[*shared, *left, *self._cached(moment.cached)]] if moment.left_until else []
        run = self._run_of[moment.place]
        if run.length == 1:
            peaks = self._sum(run, str(moment.peak), len(run.menu))
            left = self._left[moment.left_until]
            return [[*shared, *left, *self._cached(moment.cached), *peaks]]
        is_last = moment.place == (run.stop - 1 if moment.peak == "forward_peak" else run.start)
        return [self._within(run, moment, j, shared) for j in range(len(run.menu)) if is_last]

    def _within(self, run: _Run, moment: Moment, j: int, shared: _Sum) -> _Sum:
        """The sum at the last block of a run that has its j-th candidate."""
        own = self._term(run, run.menu[j])
        before = [*self._left[run.start], *self._sum(run, "left", j + 1)]
        if moment.peak == "backward_peak":
            cached = self._cached(moment.cached)
            return [*shared, *before, *cached, (run.uses + j, own.backward_peak / _MIB)]
        cached = self._cached(range(moment.cached.start, run.start))
        cached += self._sum(run, "cached", j + 1)
        peak = own.forward_peak - own.left - own.cached
        return [*shared, *before, *cached, (run.uses + j, peak / _MIB)]

    def constant(self, moment: Moment) -> int:
        """The constant of a moment's sums; in a run of several blocks, that of its last one."""
        run = None if moment.place is None else self._run_of[moment.place]
        if run is None or run.length == 1:
            return moment.constant
        made = self.timeline.moments[run.stop].constant  # of the forward of its last block
        if moment.peak == "forward_peak":
            return made
        return made + max(self.timeline.waiting[run.start : run.stop])

    def _cached(self, places: range) -> _Sum:
        runs = dict.fromkeys(run for i in places if (run := self._run_of[i]))
        return [term for run in runs for term in self._sum(run, "cached", len(run.menu))]

    def _waiting(self, moment: Moment) -> _Sum:
        if moment.waiting_from is None:
            return []
        runs = (self._run_of[i] for i in range(moment.waiting_from, self.timeline.count))
        return [term for run in runs for term in self._sum(run, "waiting", len(run.menu))]

    def bound_moves(self) -> None:
        """Move no more than the tier has room for."""
        room = self.timeline.profile.tier_bytes
        moved = [term for run in self.runs for term in self._sum(run, "moved", len(run.menu))]
        if room is not None and moved:
            self.program.add_row(moved, -np.inf, room / _MIB)

    def add_time(self) -> None:
        """Minimize the step's time; of candidates that take as long, those that hold less."""
        profile, seconds = self.timeline.profile, []
        waits = [(self.program.add_column(), name) for name in ("forward", "backward")]
        spare: dict[str, _Sum] = {name: [(column, 1.0)] for column, name in waits}
        for run in self.runs:
            for j, k in enumerate(run.menu):
                candidate = profile.candidates(run.start)[k]
                seconds.append(candidate.seconds)
                cost = candidate.seconds + 1e-12 * candidate.bytes_held / _MIB
                self.program.costs[run.counts + j] = cost
                taken = candidate.bytes_moved / (profile.bytes_per_second or 1.0)
                for name, terms in spare.items():
                    terms.append((run.counts + j, getattr(candidate, f"{name}_seconds") - taken))
        for column, name in waits:
            self.program.add_row(spare[name], 0, np.inf)
            self.program.costs[column] = 1.0
        # So that HiGHS, which takes a millionth for nothing, sees differences of microseconds.
        scale = 1e4 / min((taken for taken in seconds if taken > 0), default=1.0)
        self.program.costs = [cost * scale for cost in self.program.costs]

    def indices(self, values: list[float]) -> list[int]:
        """The index of the candidate at each place."""
        found: list[int] = []
        for run in self.runs:
            counts = [round(values[run.counts + j]) for j in range(len(run.menu))]
            found += [k for k, count in zip(run.menu, counts, strict=True) for _ in range(count)]
        return found


def _runs(timeline: Timeline) -> list[tuple[int, int]]:
    """Where runs of alike blocks start and stop; where blocks differ, or repeat, each is alone."""
    profile, count = timeline.profile, timeline.count
    paths = [path for path, _ in profile.order]
    if len(profile.blocks) > 1 or len(set(paths)) < count:
        return [(i, i + 1) for i in range(count)]
    starts = [0]
    for i in range(1, count):
        same_terms = timeline.terms[i] == timeline.terms[i - 1]
        same_epoch = not profile.cast_epochs or profile.cast_epochs[i] == profile.cast_epochs[i - 1]
        if not (same_terms and same_epoch):
            starts.append(i)
    return list(zip(starts, [*starts[1:], count], strict=True))


def fastest(timeline: Timeline, budget: int, effort: Effort = EXACT) -> Solution | None:
    """The fastest choice that the program finds within a budget; None if it finds none."""
    rows = _Rows(timeline)
    for moment in timeline.moments:
        room = (budget - timeline.base - rows.constant(moment)) / _MIB
        if room < 0 and not moment.left_until and moment.place is None:
            return None
        for terms in rows.moment_sums(moment):
            rows.program.add_row(terms, -np.inf, room)
    rows.bound_moves()
    rows.add_time()
    return _solution(rows, effort)


def least_peak(timeline: Timeline, effort: Effort = ROUGH) -> Solution:
    """The choice with the lowest peak that the program finds, by bytes alone."""
    rows = _Rows(timeline)
    peak = rows.program.add_column()
    rows.program.costs[peak] = 1.0
    for moment in timeline.moments:
        constant = (timeline.base + rows.constant(moment)) / _MIB
        for terms in rows.moment_sums(moment) or [[]]:
            rows.program.add_row([(peak, 1.0), *((c, -v) for c, v in terms)], constant, np.inf)
    for run in rows.runs:  # of equals, those that hold less
        for j, k in enumerate(run.menu):
            rows.program.costs[run.counts + j] = 1e-9 * timeline.terms[run.start][k].left / _MIB
    found = _solution(rows, effort)
    assert found is not None, "some choice has the lowest peak"
    return found


def _solution(rows: _Rows, effort: Effort) -> Solution | None:
    if len(rows.runs) < rows.timeline.count:
        effort = effort._replace(gap=_RUN_GAP)
    found = rows.program.solve(effort)
    if found is None:
        return None
    values, gap = found
    return solution_of(rows.timeline, rows.indices(values), gap)


def solution_of(timeline: Timeline, indices: list[int], gap: float) -> Solution:
    """A choice, by the indices of its candidates, as a solution."""
    candidates: list[Candidate] = [timeline.profile.candidates(i)[k] for i, k in enumerate(indices)]
    prediction, heads = timeline.predict(indices), timeline.profile.heads
    return Solution(tuple(candidates), prediction, gap, heads)
