"""Solves for a candidate for each block: within a budget at the least time, or at the lowest peak.

Where no candidate moves results, the integer program (`milp`) solves to the gap that it reports.
Where some do, it is solved without them (with them too if nothing fits otherwise, or if there are
many blocks, all alike), and a local search on the timeline goes on from there: good plans, with no
proof of how good. More starts from a program with the candidates that move results were tried: they
cost most of the time, HiGHS was stopped by the clock, and annealing led to plans as good without.
Either may miss the best by what its module says, but not the best uniform choice (`uniform`), which
is one of the choices that are compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from rekindle.planner.solve import milp
from rekindle.planner.solve.local_search import anneal, local_search
from rekindle.planner.solve.milp import EXACT, ROUGH
from rekindle.planner.solve.uniform import best_uniform
from rekindle.planner.timeline import Terms, Timeline
from rekindle.planner.types import Candidate, Profile, Solution

_DEEP = 64
"""Alike blocks of which more leave annealing too few tries to find on its own which should move."""


def choose(profile: Profile, budget: int) -> Solution | None:
    """The fastest choice whose predicted peak is within a budget; None if none is found."""
    found = [_choose_blocks(each, budget) for each in profile.with_each_rest()]
    fitting = [choice for choice in found if choice is not None]
    return min(fitting, key=lambda choice: choice.prediction.seconds, default=None)


def _choose_blocks(profile: Profile, budget: int) -> Solution | None:
    """The fastest choice of candidates for the blocks, with one way to run the rest."""
    timeline = Timeline(profile)
    floor = best_uniform(timeline, budget)
    if not moves(profile):
        return _faster(_within(timeline, budget), floor, budget)
    still = milp.fastest(Timeline(without_offload(profile)), budget, ROUGH)
    is_deep = len(profile.blocks) == 1 and timeline.count > _DEEP
    moving = None if still and not is_deep else milp.fastest(timeline, budget, ROUGH)
    starts = [start for start in (still, moving) if start is not None]
    starts += [_spread(timeline, start) for start in starts[-1:]]
    if floor is not None:  # what it leads to is chosen only if it is no slower than the others
        starts.append(replace(floor, gap=min([1.0, *(start.gap for start in starts)])))
    if all(each.prediction.peak > budget for each in starts):
        starts.append(_least_of_blocks(profile))
    best = anneal(timeline, local_search(timeline, starts, budget), budget)
    return best if best.prediction.peak <= budget else None


def _faster(found: Solution | None, floor: Solution | None, budget: int) -> Solution | None:
    """Of a choice and the best uniform one, the faster that fits; the choice, if they tie."""
    if floor is None or found is None:
        return found or floor
    if found.prediction.peak > budget:
        return floor
    is_faster = floor.prediction.seconds < found.prediction.seconds
    return replace(floor, gap=found.gap) if is_faster else found


def _within(timeline: Timeline, budget: int) -> Solution | None:
    """Solve the integer program; once more with a little less if HiGHS rounded over the budget."""
    found = milp.fastest(timeline, budget, EXACT)
    if found is None or found.prediction.peak <= budget:
        return found
    return milp.fastest(timeline, 2 * budget - found.prediction.peak, EXACT)


def least_peak(profile: Profile) -> Solution:
    """The choice with the lowest peak.

    As far as nothing moves, by bytes alone: the same for every measurement of the same step.
    """
    found = map(_least_of_blocks, profile.with_each_rest())
    return min(found, key=lambda choice: choice.prediction.peak)


def _least_of_blocks(profile: Profile) -> Solution:
    """The choice with the lowest peak, with one way to run the rest."""
    still = milp.least_peak(Timeline(without_offload(profile)))
    if not moves(profile):
        return still
    timeline = Timeline(profile)
    return local_search(timeline, [still, _least_held(timeline)], 0)


def moves(profile: Profile) -> bool:
    """Returns whether any candidate moves results."""
    return any(each.bytes_moved for block in profile.blocks for each in block.candidates)


def without_offload(profile: Profile) -> Profile:
    """The profile with the candidates that move nothing."""
    return only(profile, lambda candidate: not candidate.bytes_moved)


def only(profile: Profile, is_meant: Callable[[Candidate], bool]) -> Profile:
    """The profile with some of its candidates."""
    blocks = (
        replace(block, candidates=tuple(filter(is_meant, block.candidates)))
        for block in profile.blocks
    )
    return replace(profile, blocks=tuple(blocks))


def _least_held(timeline: Timeline) -> Solution:
    """Every block by the candidate that leaves least on the device."""
    return milp.solution_of(timeline, [_leanest(menu) for menu in timeline.terms], 0.0)


def _leanest(menu: Sequence[Terms]) -> int:
    """The candidate that leaves least, or hardly more; of several, the one that moves least."""
    lefts = [terms.left for terms in menu]
    enough = min(lefts) + max(lefts) // 100
    lean = [k for k, left in enumerate(lefts) if left <= enough]
    return min(lean, key=lambda k: (menu[k].moved, lefts[k]))


def _spread(timeline: Timeline, solution: Solution) -> Solution:
    """Spread the blocks that move results evenly between the others, where all blocks are alike.

    The integer program does not see how copies pile up in the link.
    """
    profile = timeline.profile
    if len(profile.blocks) > 1:
        return solution
    menu, count = profile.candidates(0), timeline.count
    moving = [menu.index(each) for each in solution.candidates if each.bytes_moved]
    others = [menu.index(each) for each in solution.candidates if not each.bytes_moved]
    places = {i * count // len(moving) for i in range(len(moving))} if moving else set()
    indices = [(moving if i in places else others).pop(0) for i in range(count)]
    return milp.solution_of(timeline, indices, solution.gap)
