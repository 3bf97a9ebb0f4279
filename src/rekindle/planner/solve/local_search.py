"""Local search on the timeline: a choice is changed block by block for as long as it gets better.

It makes up for what the integer program does not see: copies that are on their way, and who waits
for whom. First the steepest descent: of all changes of one block, the best. Then simulated
annealing (Kirkpatrick et al., 1983): two blocks at a time get other candidates, those of blocks
alike, or each other's, and changes for the worse are taken too, by less and less. Neither is sure
to find the best. Both stop by the number of blocks that they evaluate, not by the clock.
"""

from collections.abc import Sequence
from math import log
from random import Random

from rekindle.planner.solve.milp import solution_of
from rekindle.planner.timeline import Evaluation, Timeline
from rekindle.planner.types import Solution

MAX_BLOCK_EVALUATIONS = 200_000
"""Blocks that are evaluated in a descent, about a third of a second."""
_MAX_ANNEALING = 400_000
"""Blocks that are evaluated in annealing, most of them by half: about half a second."""
_SWAPS = 0.3
"""The share of tries that have two blocks of a kind swap their candidates."""
_COPIES = 0.5
"""Of the other tries, the share that have a block take the candidate of another of its kind.

Candidates that are chosen somewhere are likely to be good elsewhere; most others are not.
"""
_HEAT = 0.003
"""How much worse a choice may become at first, as a share of its time."""
_EXCESS_WEIGHT = 3.0
"""How much worse it makes a choice to be over the budget, by the share that it is over."""


def local_search(
    timeline: Timeline,
    starts: Sequence[Solution],
    budget: int,
    evaluations: int = MAX_BLOCK_EVALUATIONS,
) -> Solution:
    """The best choice that a descent from any of some choices leads to.

    Of two choices, the better one is less above the budget, or else faster; with a budget of 0,
    the better one has the lower peak.
    """
    search = _Search(timeline, budget)
    found = [search.descend(start, evaluations // len(starts)) for start in starts]
    return min(found, key=search.rank)


def anneal(timeline: Timeline, start: Solution, budget: int) -> Solution:
    """The choice, or a better one that is found by changes at random; repeatable."""
    return _Search(timeline, budget).anneal(start)


class _Search:
    """Changes of a choice, which is the index of a candidate at each place."""

    def __init__(self, timeline: Timeline, budget: int) -> None:
        self._timeline = timeline
        self._budget = budget
        profile = timeline.profile
        self._menus = [profile.candidates(i) for i in range(timeline.count)]
        paths = [path for path, _ in profile.order]
        self._calls = [[j for j, other in enumerate(paths) if other == path] for path in paths]
        """At each place, all places of its block."""
        kinds = [kind for _, kind in profile.order]
        self._alike = [[j for j, other in enumerate(kinds) if other == kind] for kind in kinds]
        """At each place, all places of blocks of its kind."""

    def rank(self, solution: Solution) -> tuple[int, float]:
        """Bytes above the budget, then seconds: the lower the better."""
        found = solution.prediction
        return max(found.peak - self._budget, 0), found.seconds

    def _rank(self, found: Evaluation) -> tuple[int, float]:
        return max(self._timeline.base + found.peak - self._budget, 0), found.seconds

    def _indices(self, solution: Solution) -> list[int]:
        return [
            menu.index(candidate)
            for menu, candidate in zip(self._menus, solution.candidates, strict=True)
        ]

    def descend(self, start: Solution, evaluations: int) -> Solution:
        """The choice after the best change of one block, again and again until none is better."""
        timeline = self._timeline
        indices = self._indices(start)
        choice = [timeline.terms[i][k] for i, k in enumerate(indices)]
        rank, count = self._rank(timeline.evaluate(choice)), 0
        while count < evaluations:
            best, change = rank, None
            for place in self._ends_of_runs(indices):
                if count >= evaluations:
                    break
                calls = self._calls[place]
                was = [choice[i] for i in calls]
                for k in range(len(self._menus[place])):
                    if k == indices[place]:
                        continue
                    for i in calls:
                        choice[i] = timeline.terms[i][k]
                    found = self._rank(timeline.evaluate(choice))
                    count += timeline.count
                    if found < best:
                        best, change = found, (place, k)
                for i, terms in zip(calls, was, strict=True):
                    choice[i] = terms
            if change is None:
                break
            place, k = change
            rank = best
            for i in self._calls[place]:
                indices[i], choice[i] = k, timeline.terms[i][k]
        return solution_of(timeline, indices, start.gap)

    def _ends_of_runs(self, indices: list[int]) -> list[int]:
        """The places where a run of equal candidates begins or ends."""
        kinds, last = self._timeline.profile.order, len(indices) - 1
        chosen = [(kinds[i][1], k) for i, k in enumerate(indices)]
        return [
            i
            for i in range(len(indices))
            if i in (0, last) or chosen[i - 1] != chosen[i] or chosen[i + 1] != chosen[i]
        ]

    def anneal(self, start: Solution) -> Solution:
        """The best choice on a random walk that gets colder."""
        timeline, count = self._timeline, self._timeline.count
        if any(len(calls) > 1 for calls in self._calls):
            return start  # a block that is called twice has one candidate
        dice = Random(0)
        pairs = sum(map(len, self._menus)) ** 2
        tries = min(_MAX_ANNEALING // count, 4 * pairs)
        whole = start.prediction.seconds or 1.0
        best = now = self._indices(start)
        best_rank = self.rank(start)

        def cost(rank: tuple[int, float]) -> float:
            return rank[1] / whole + _EXCESS_WEIGHT * rank[0] / max(self._budget, 1)

        def is_hopeless(peak: int, seconds: float) -> bool:
            return cost((max(timeline.base + peak - self._budget, 0), seconds)) > allowed

        cost_now = cost(best_rank)
        for step in range(tries):
            indices = self._changed(now, dice)
            allowed = cost_now - _HEAT * (1 - step / tries) ** 2 * log(1 - dice.random())
            choice = [timeline.terms[i][k] for i, k in enumerate(indices)]
            found = timeline.evaluate_unless(choice, is_hopeless)
            if found is None or cost(rank := self._rank(found)) > allowed:
                continue
            now, cost_now = indices, cost(rank)
            if rank < best_rank:
                best, best_rank = indices, rank
        return solution_of(timeline, best, start.gap)

    def _changed(self, indices: list[int], dice: Random) -> list[int]:
        """The choice with other candidates at two places, or with theirs swapped."""
        one, other = dice.randrange(len(indices)), dice.randrange(len(indices))
        changed = list(indices)
        if other in self._alike[one] and dice.random() < _SWAPS:
            changed[one], changed[other] = indices[other], indices[one]
            return changed
        for place in (one, other):
            if dice.random() < _COPIES:
                changed[place] = indices[dice.choice(self._alike[place])]
            else:
                changed[place] = dice.randrange(len(self._menus[place]))
        return changed
