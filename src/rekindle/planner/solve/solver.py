"""One candidate for each block, so that the step's peak stays below a budget at the least time.

A multiple-choice knapsack with a row for each point of the step's timeline, solved by HiGHS. Where
all blocks are alike, as in most models, it is enough to count: milliseconds for any number of them.
Where they differ, each place has a candidate of its own; then the search ends after some seconds,
and says how far from the best its answer may be.
"""

from collections.abc import Callable
from dataclasses import replace
from math import exp
from random import Random

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from rekindle.planner.timeline import simulate
from rekindle.planner.types import Candidate, Prediction, Profile, Solution

_MIB = 2**20
_EXACTLY = {"time_limit": 2.0, "mip_rel_gap": 5e-4}
_ROUGHLY = {"time_limit": 1.5, "mip_rel_gap": 2e-3}
"""Where there is a link: there the answer is improved afterwards anyway."""


class _Rows:
    """Rows `lower <= row . x`, put together entry by entry."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, float]] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(self, entries: list[tuple[int, float]], lower: float, upper: float) -> None:
        row = len(self.lower)
        self._entries += [(row, column, value) for column, value in entries]
        self.lower.append(lower)
        self.upper.append(upper)

    def matrix(self, columns: int) -> "coo_array":
        rows, cols, values = zip(*self._entries, strict=True)
        return coo_array((values, (rows, cols)), shape=(len(self.lower), columns))


def choose(profile: Profile, budget: int) -> Solution | None:
    """The fastest choice whose simulated peak is within a budget; None if there is none.

    Where nothing moves, that is what the solver says. To it, what is on the way is as much as the
    most that any block moves, and no host is late; where that is not so, the choice is improved
    block by block, and then shaken.
    """
    effort = _ROUGHLY if moves(profile) else _EXACTLY
    still = _solved(without_offload(profile), budget, effort)
    if not moves(profile):
        return still
    moving = _solved(profile, budget, effort)
    starts = [choice for choice in (still, moving) if choice is not None]
    starts += [_spread(profile, choice) for choice in starts[-1:]]
    if not starts:
        starts = [_least_held(profile)]
    looks = _LOOKS // len(starts)
    found = [improved(profile, choice, budget, looks) for choice in starts]
    best = min(found, key=lambda choice: _badness(choice.prediction, budget))
    best = shaken(profile, best, budget)
    if best.prediction.peak > budget:
        best = shaken(profile, smallest(profile), budget)
    return best if best.prediction.peak <= budget else None


def without_offload(profile: Profile) -> Profile:
    """The profile, as if there were no link."""
    return only(profile, lambda candidate: not candidate.bytes_moved)


def only(profile: Profile, is_meant: Callable[[Candidate], bool]) -> Profile:
    """The profile with some of its candidates."""
    blocks = (
        replace(block, candidates=tuple(filter(is_meant, block.candidates)))
        for block in profile.blocks
    )
    return replace(profile, blocks=tuple(blocks))


def _solved(profile: Profile, budget: int, effort: dict[str, float]) -> Solution | None:
    if counts(profile):
        return _choose_counts(profile, budget, {**effort, "mip_rel_gap": 1e-6})
    return _choose_each(profile, budget, effort)


def _held(candidate: Candidate, passed: int) -> float:
    """What is left on the device by a block that was handed so much, in MiB."""
    return (candidate.bytes_held - min(passed, candidate.input_freed)) / _MIB


def _cached(profile: Profile, candidate: Candidate) -> float:
    """Casts that autocast's cache holds from a block's forward to the head, in MiB."""
    return candidate.casts_cached / _MIB if len(set(profile.cast_epochs)) == 1 else 0.0


def counts(profile: Profile) -> bool:
    """Whether blocks are alike, so that it is enough to count them."""
    return len(profile.blocks) == 1 and len({path for path, _ in profile.order}) == len(
        profile.order
    )


def _least_held(profile: Profile) -> Solution:
    """Every block by the candidate that holds least."""
    menus = (profile.candidates(i) for i in range(len(profile.order)))
    candidates = tuple(min(menu, key=_bytes_held) for menu in menus)
    return Solution(candidates, simulate(profile, candidates), 0.0)


def _spread(profile: Profile, choice: Solution) -> Solution:
    """The same candidates, with those that move something evenly between the others."""
    if len(profile.blocks) > 1:
        return choice
    moving = [candidate for candidate in choice.candidates if candidate.bytes_moved]
    others = [candidate for candidate in choice.candidates if not candidate.bytes_moved]
    count = len(choice.candidates)
    places = {i * count // len(moving) for i in range(len(moving))} if moving else set()
    candidates = tuple((moving if i in places else others).pop(0) for i in range(count))
    return Solution(candidates, simulate(profile, candidates), choice.gap)


_LOOKS = 200_000
"""Blocks that are looked at to improve a choice, about a third of a second."""


def improved(profile: Profile, choice: Solution, budget: int, most: int = _LOOKS) -> Solution:
    """The choice, changed one block at a time as long as that makes it better."""
    paths = [path for path, _ in profile.order]
    looks = 0
    while looks < most:
        best = choice
        for place in _edges(choice.candidates):
            if looks >= most:
                break
            same = {i for i, path in enumerate(paths) if path == paths[place]}
            for candidate in profile.candidates(place):
                candidates = tuple(
                    candidate if i in same else o for i, o in enumerate(choice.candidates)
                )
                prediction = simulate(profile, candidates)
                looks += len(candidates)
                if _badness(prediction, budget) < _badness(best.prediction, budget):
                    best = Solution(candidates, prediction, choice.gap)
        if best is choice:
            return choice
        choice = best
    return choice


def _badness(prediction: Prediction, budget: int) -> tuple[int, float]:
    return max(prediction.peak - budget, 0), prediction.seconds


_LOOKS_SHAKING = 250_000
"""Blocks that are looked at to shake a choice, about half a second."""
_SWAPS = 0.3
"""The share of tries that have two blocks of a kind swap their candidates."""
_HEAT = 0.003
"""How much worse a choice may become at first, as a share of its time."""
_TOO_MUCH = 3.0
"""How much worse it makes a choice to be over the budget, by the share that it is over."""


def shaken(profile: Profile, choice: Solution, budget: int) -> Solution:
    """The choice, or a better one that is found by changing two blocks at a time at random.

    They get other candidates, or each other's. What makes things worse is taken too, if it is by
    little, and by less and less: simulated annealing. At random, but the same for the same
    question.
    """
    if len({path for path, _ in profile.order}) < len(profile.order):
        return choice  # a block that is called twice has one candidate
    dice = Random(0)
    count = len(profile.order)
    pairs = sum(len(profile.candidates(i)) for i in range(count)) ** 2
    tries = min(_LOOKS_SHAKING // count, 4 * pairs)
    whole = choice.prediction.seconds or 1.0

    def cost(found: Prediction) -> float:
        return found.seconds / whole + _TOO_MUCH * max(found.peak - budget, 0) / budget

    now, cost_now = choice.candidates, cost(choice.prediction)
    for i in range(tries):
        heat = _HEAT * (1 - i / tries) ** 2
        one, other = dice.randrange(count), dice.randrange(count)
        candidates = list(now)
        if profile.order[one][1] == profile.order[other][1] and dice.random() < _SWAPS:
            candidates[one], candidates[other] = candidates[other], candidates[one]
        else:
            candidates[one] = dice.choice(profile.candidates(one))
            candidates[other] = dice.choice(profile.candidates(other))
        prediction = simulate(profile, candidates)
        worse = cost(prediction) - cost_now
        if worse <= 0 or dice.random() < exp(-worse / heat):
            now, cost_now = tuple(candidates), cost_now + worse
            if _badness(prediction, budget) < _badness(choice.prediction, budget):
                choice = Solution(now, prediction, choice.gap)
    return choice


def _edges(candidates: tuple[Candidate, ...]) -> list[int]:
    """The places where a run of equal candidates begins or ends."""
    last = len(candidates) - 1
    return [
        i
        for i in range(len(candidates))
        if i in (0, last)
        or candidates[i - 1] != candidates[i]
        or candidates[i + 1] != candidates[i]
    ]


def _choose_counts(profile: Profile, budget: int, effort: dict[str, float]) -> Solution | None:
    """The choice where all blocks are alike: how many of them run by which candidate.

    Where they run follows: those whose backward needs more come first in the forward, and so last
    in the backward, when less is held. That is the best order for the backward's peaks: of two
    neighbours, the other order adds what both hold to the larger need.
    """
    menu = sorted(profile.blocks[0].candidates, key=_backward_peak, reverse=True)
    count, many = len(profile.order), len(menu)
    room, passed = _room(profile, budget), min(profile.passed[1:], default=0)
    casts = [_cached(profile, candidate) for candidate in menu]
    # How many, whether any, which is first; then the largest move and two waits.
    any_, first, flying = many, 2 * many, 3 * many
    out, into, columns = flying + 1, flying + 2, flying + 3
    rows = _Rows()
    rows.add([(k, 1.0) for k in range(many)], count, count)
    # What all are handed, as the others count it, is not handed to the first.
    back = [(first + k, o.bytes_held / _MIB - _held(o, passed)) for k, o in enumerate(menu)]
    if any(nbytes for _, nbytes in back):
        rows.add([(first + k, 1.0) for k in range(many)], 1, 1)
        for k in range(many):
            rows.add([(k, 1.0), (first + k, -1.0)], 0, np.inf)
            rows.add([(any_ + k, 1.0), *((first + i, 1.0) for i in range(k + 1, many))], 0, 1)
    for k, candidate in enumerate(menu):
        rows.add([(any_ + k, float(count)), (k, -1.0)], 0, np.inf)
        held = [*((i, _held(menu[i], passed)) for i in range(k + 1)), *back]
        forward = [(i, nbytes + casts[i]) for i, nbytes in held[: k + 1]] + back
        peak = candidate.forward_peak / _MIB - _held(candidate, passed) - casts[k]
        rows.add([*forward, (any_ + k, peak), (flying, 1.0)], -np.inf, room)
        there = held if not profile.casts_in_backward else [*held, *enumerate(casts)]
        peak = (candidate.backward_peak + profile.output_held) / _MIB
        rows.add([*there, (any_ + k, peak), (flying, 1.0)], -np.inf, room)
        rows.add([(flying, 1.0), (any_ + k, -candidate.bytes_moved / _MIB)], 0, np.inf)
    held = [*((i, _held(candidate, passed)) for i, candidate in enumerate(menu)), *back]
    there = [*held, *enumerate(casts)]
    if any(casts):
        rows.add([*there, (flying, 1.0)], -np.inf, room - profile.cached_rest_peak / _MIB)
    if not profile.casts_in_backward:
        there = held
    rows.add([*there, (flying, 1.0)], -np.inf, room - profile.rest_peak / _MIB)
    for wait, name in ((out, "forward_seconds"), (into, "backward_seconds")):
        spare = [
            (
                k,
                getattr(candidate, name)
                - candidate.bytes_moved / (profile.bytes_per_second or 1.0),
            )
            for k, candidate in enumerate(menu)
        ]
        rows.add([(wait, 1.0), *spare], 0, np.inf)
    cost = np.zeros(columns)
    cost[:many] = [candidate.seconds + 1e-12 * candidate.bytes_held / _MIB for candidate in menu]
    cost[out] = cost[into] = 1.0
    cost *= _scale(menu)
    limits = np.concatenate([np.full(many, count), np.ones(2 * many), np.full(3, np.inf)])
    result = milp(
        cost,
        constraints=LinearConstraint(rows.matrix(columns).tocsr(), rows.lower, rows.upper),
        integrality=np.concatenate([np.ones(3 * many), np.zeros(3)]),
        bounds=Bounds(0, limits),
        options=effort,
    )
    if result.x is None:
        return None
    candidates = tuple(
        candidate for k, candidate in enumerate(menu) for _ in range(round(result.x[k]))
    )
    return Solution(candidates, simulate(profile, candidates), float(result.mip_gap or 0.0))


def _room(profile: Profile, budget: int) -> float:
    """What is left for the blocks, in MiB; all that is made between them counts as there."""
    taken = profile.static_bytes + profile.before_bytes + sum(profile.between)
    return (budget - taken) / _MIB


def _scale(candidates: list[Candidate]) -> float:
    """So that HiGHS, which takes a millionth for nothing, sees differences of microseconds."""
    seconds = [candidate.seconds for candidate in candidates if candidate.seconds > 0]
    return 1e4 / min(seconds, default=1.0)


def _backward_peak(candidate: Candidate) -> tuple[int, int]:
    return candidate.backward_peak, candidate.bytes_moved


def _choose_each(profile: Profile, budget: int, effort: dict[str, float]) -> Solution | None:
    """The choice where blocks differ: an candidate for each place."""
    menus = [profile.candidates(position) for position in range(len(profile.order))]
    room, output = _room(profile, budget), profile.output_held / _MIB
    starts = np.cumsum([0, *(len(menu) for menu in menus)])
    binaries = int(starts[-1])
    count = len(menus)
    # After the candidates: what is held after each block, the largest move, and two waits.
    held, flying, wait_out, wait_in = binaries, binaries + count, binaries + count + 1, -1
    columns = binaries + count + 3
    wait_in = columns - 1
    rows = _Rows()

    def column(block: int, index: int) -> int:
        return int(starts[block]) + index

    casts: list[tuple[int, float]] = []
    for i, menu in enumerate(menus):
        rows.add([(column(i, k), 1.0) for k in range(len(menu))], 1, 1)
        before = [(held + i - 1, 1.0)] if i else []
        passed = profile.passed[i] if profile.passed else 0
        is_again = profile.order[i][0] in {path for path, _ in profile.order[:i]}
        sums = [
            (column(i, k), _held(candidate, passed) - is_again * candidate.casts_held / _MIB)
            for k, candidate in enumerate(menu)
        ]
        rows.add([*before, *sums, (held + i, -1.0)], 0, 0)
        peaks = [(column(i, k), candidate.forward_peak / _MIB) for k, candidate in enumerate(menu)]
        rows.add([*before, *casts, *peaks, (flying, 1.0)], -np.inf, room)
        if not is_again:
            cached = [(column(i, k), _cached(profile, o)) for k, o in enumerate(menu)]
            casts += [(place, nbytes) for place, nbytes in cached if nbytes]
    there = casts if profile.casts_in_backward else []
    for i, menu in enumerate(menus):
        peaks = [(column(i, k), candidate.backward_peak / _MIB) for k, candidate in enumerate(menu)]
        rows.add([(held + i, 1.0), *there, *peaks, (flying, 1.0)], -np.inf, room - output)
        moves = [(column(i, k), candidate.bytes_moved / _MIB) for k, candidate in enumerate(menu)]
        rows.add([*((c, -v) for c, v in moves), (flying, 1.0)], 0, np.inf)
    last = [(held + count - 1, 1.0), (flying, 1.0)]
    rows.add([*last, *there], -np.inf, room - profile.rest_peak / _MIB)
    if casts:
        rows.add([*last, *casts], -np.inf, room - profile.cached_rest_peak / _MIB)
    _add_waits(rows, profile, menus, column, wait_out, wait_in)
    first: dict[str, int] = {}
    for i, (path, _) in enumerate(profile.order):  # a block that is called twice has one candidate
        other = first.setdefault(path, i)
        if other != i:
            for k in range(len(menus[i])):
                rows.add([(column(i, k), 1.0), (column(other, k), -1.0)], 0, 0)

    cost = np.zeros(columns)
    for i, menu in enumerate(menus):
        for k, candidate in enumerate(menu):  # of equals, the one that holds less
            cost[column(i, k)] = candidate.seconds + 1e-12 * candidate.bytes_held / _MIB
    cost[wait_out] = cost[wait_in] = 1.0
    cost *= _scale([candidate for menu in menus for candidate in menu])
    result = milp(
        cost,
        constraints=LinearConstraint(rows.matrix(columns).tocsr(), rows.lower, rows.upper),
        integrality=np.concatenate([np.ones(binaries), np.zeros(columns - binaries)]),
        bounds=Bounds(0, np.concatenate([np.ones(binaries), np.full(columns - binaries, np.inf)])),
        options=effort,
    )
    if result.x is None:
        return None
    candidates = tuple(
        menu[int(np.argmax(result.x[starts[i] : starts[i + 1]]))] for i, menu in enumerate(menus)
    )
    return Solution(candidates, simulate(profile, candidates), float(result.mip_gap or 0.0))


def _add_waits(rows: _Rows, profile: Profile, menus, column, out: int, into: int) -> None:  # type: ignore[no-untyped-def]
    """The device waits for what the link has no time for, both ways."""
    for wait, seconds in ((out, "forward_seconds"), (into, "backward_seconds")):
        entries = [(wait, 1.0)]
        for i, menu in enumerate(menus):
            for k, candidate in enumerate(menu):
                taken = candidate.bytes_moved / (profile.bytes_per_second or 1.0)
                entries.append((column(i, k), getattr(candidate, seconds) - taken))
        rows.add(entries, 0, np.inf)


def smallest(profile: Profile) -> Solution:
    """The choice with the lowest peak: by bisection over budgets, then step by step.

    As far as nothing moves, by bytes alone: the same for every measurement of the same step.
    """
    still = _timeless(without_offload(profile))
    largest = [max(still.candidates(i), key=_bytes_held) for i in range(len(still.order))]
    low, high = 0, max(simulate(still, largest).peak, 1)
    best = _solved(still, high, _ROUGHLY) or _solved(still, 4 * high, _ROUGHLY)
    assert best is not None, "four times the plain peak is enough for anything"
    while high - low > max(high // 500, 1):
        middle = (low + high) // 2
        found = _solved(still, middle, _ROUGHLY)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, found.prediction.peak)
    timed = without_offload(profile)
    candidates = tuple(
        timed.candidates(i)[still.candidates(i).index(candidate)]
        for i, candidate in enumerate(best.candidates)
    )
    best = Solution(candidates, simulate(profile, candidates), best.gap)
    if not moves(profile):
        return best
    starts = best, _least_held(profile)
    return min((improved(profile, start, 0) for start in starts), key=_peak)


def _timeless(profile: Profile) -> Profile:
    """The profile as if nothing took any time."""

    def timeless(candidate: Candidate) -> Candidate:
        return replace(
            candidate,
            forward_seconds=0.0,
            backward_seconds=0.0,
            forward_host_seconds=0.0,
            backward_host_seconds=0.0,
            seconds_noise=0.0,
        )

    blocks = (
        replace(block, candidates=tuple(map(timeless, block.candidates)))
        for block in profile.blocks
    )
    return replace(profile, blocks=tuple(blocks))


def moves(profile: Profile) -> bool:
    """Whether any candidate sends something to host memory."""
    return any(candidate.bytes_moved for block in profile.blocks for candidate in block.candidates)


def _peak(choice: Solution) -> int:
    return choice.prediction.peak


def _bytes_held(candidate: Candidate) -> int:
    return candidate.bytes_held
