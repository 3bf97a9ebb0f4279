"""Uniform plans, the floor of every plan: one treatment for the first blocks, the others kept.

A user without a planner would write one of these: keep all, recompute all, recompute k of n blocks,
one policy everywhere, each without offload or with. They are cheap to evaluate, so the solver never
returns a choice that is predicted to be slower than the best of them that fits.
"""

from collections.abc import Iterator

from rekindle.planner.candidates import kind_of_candidate
from rekindle.planner.solve.milp import solution_of
from rekindle.planner.timeline import Timeline
from rekindle.planner.types import Solution
from rekindle.strategy import Keep


def best_uniform(timeline: Timeline, budget: int) -> Solution | None:
    """The fastest uniform choice within a budget; None if none fits.

    Of each treatment as few blocks have it as the budget allows. They are the first ones of the
    forward: the backward of the others comes first, and frees what they keep.
    """
    found = [
        solution
        for treatment in _treatments(timeline)
        if (solution := _fewest(timeline, treatment, budget)) is not None
    ]
    return min(found, key=lambda solution: solution.prediction.seconds, default=None)


def _fewest(timeline: Timeline, treatment: list[int], budget: int) -> Solution | None:
    """The choice that gives the treatment to as few blocks as fit the budget, by bisection."""
    keep = _keeping(timeline)
    paths = [path for path, _ in timeline.profile.order]
    order = {path: i for i, path in enumerate(dict.fromkeys(paths))}

    def solution(count: int) -> Solution:
        indices = [treatment[i] if order[path] < count else keep[i] for i, path in enumerate(paths)]
        return solution_of(timeline, indices, 1.0)

    low, high = 0, len(order)
    found = solution(high)
    if found.prediction.peak > budget:
        return None
    while low < high:
        middle = (low + high) // 2
        tried = solution(middle)
        if tried.prediction.peak <= budget:
            found, high = tried, middle
        else:
            low = middle + 1
    return found


def _keeping(timeline: Timeline) -> list[int]:
    """The index at each place of the candidate that keeps all; of the first, if there is none."""
    return [
        next((k for k, each in enumerate(menu) if each.strategy == Keep()), 0)
        for menu in (timeline.profile.candidates(i) for i in range(timeline.count))
    ]


def _treatments(timeline: Timeline) -> Iterator[list[int]]:
    """Yield the index of a candidate at each place: of one kind everywhere, and of one rank in it.

    A block that has no candidate of the kind keeps all.
    """
    profile = timeline.profile
    ranked: list[dict[object, list[int]]] = []
    for block in profile.blocks:
        of_kind: dict[object, list[int]] = {}
        for k, candidate in enumerate(block.candidates):
            of_kind.setdefault(kind_of_candidate(candidate), []).append(k)
        ranked.append(of_kind)
    keep = _keeping(timeline)
    for kind in dict.fromkeys(kind for of_kind in ranked for kind in of_kind):
        for rank in range(max(len(of_kind.get(kind, ())) for of_kind in ranked)):
            indices = []
            for i, (_, index) in enumerate(profile.order):
                own = ranked[index].get(kind)
                indices.append(own[min(rank, len(own) - 1)] if own else keep[i])
            yield indices
