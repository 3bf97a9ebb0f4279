"""One profile of what several ranks measured: at each place, that of the rank with the most.

Ranks may have other batches, and then run other blocks, or other ops in a block. A plan that fits
the worst of all ranks at each place fits all of them. Blocks have the same candidates in the same
order on every rank, which differ in what they name: addresses and indices are those of the rank's
own trace.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from heapq import merge
from itertools import accumulate
from typing import Any, TypeAlias

from rekindle.planner.input_shapes import elements
from rekindle.planner.types import BlockProfile, Candidate, Profile

_MOST = (
    "bytes_held",
    "bytes_moved",
    "forward_seconds",
    "backward_seconds",
    "forward_peak",
    "backward_peak",
    "forward_host_seconds",
    "backward_host_seconds",
    "largest_moved",
    "seconds_noise",
    "casts_cached",
    "casts_held",
)
_MOST_OF_STEP = (
    "static_bytes",
    "before_bytes",
    "rest_peak",
    "rest_seconds",
    "first_peak",
    "last_peak",
    "cached_rest_peak",
    "casts_in_backward",
    "output_held",
)


Kind: TypeAlias = tuple[str, str]
"""What tells a block from others that a rank ran: its signature, and what is around it."""


@dataclass(frozen=True)
class Run:
    """The blocks that the forward of one rank ran."""

    order: tuple[str, ...]
    kinds: dict[str, Kind]
    """By path."""
    between: tuple[int, ...]
    passed: tuple[int, ...]
    cast_epochs: tuple[int, ...]
    seconds: float
    """What its step took, with every block recomputed."""


@dataclass(frozen=True)
class Joint:
    """The blocks that the forwards of several ranks ran, as those of one forward."""

    order: tuple[str, ...]
    numbers: dict[str, int]
    """By path: the number of its kind. Blocks of one kind are alike on every rank that ran them."""
    kinds: tuple[Kind, ...]
    """By number: the kind, on the first rank that ran such a block."""
    between: tuple[int, ...]
    passed: tuple[int, ...]
    cast_epochs: tuple[int, ...]
    seconds: float


def join(runs: Sequence[Run], blocks: Iterable[str]) -> Joint:
    """One forward that runs what each rank ran, in its order; else in the order of the model."""
    order, numbered = runs[0].order, {path: i for i, path in enumerate(blocks)}
    for run in runs[1:]:
        order = _merged(order, run.order, numbered)
    numbers: dict[str, int] = {}
    found: list[list[Kind | None]] = []
    for path in order:
        if path not in numbers:
            numbers[path] = _kind_among(found, [run.kinds.get(path) for run in runs])
    places = [_places(run.order, order) for run in runs]

    def joined(pick: Callable[[Iterable[int]], int], name: str) -> tuple[int, ...]:
        own = [(getattr(run, name), at) for run, at in zip(runs, places, strict=True)]
        return tuple(
            pick([values[at[i]] for values, at in own if values and at[i] is not None] or [0])
            for i in range(len(order))
        )

    return Joint(
        order,
        numbers,
        tuple(next(kind for kind in kinds if kind is not None) for kinds in found),
        between=joined(max, "between"),
        passed=joined(min, "passed"),
        cast_epochs=_rising(joined(max, "cast_epochs")),
        seconds=max(run.seconds for run in runs),
    )


def _kind_among(found: list[list[Kind | None]], own: list[Kind | None]) -> int:
    """The number of a block's kind, by its kind on each rank; None where it did not run."""
    for number, kind in enumerate(found):
        pairs = list(zip(own, kind, strict=True))
        seen = [one == other for one, other in pairs if one is not None and other is not None]
        if seen and all(seen):
            found[number] = [other if one is None else one for one, other in pairs]
            return number
    found.append(own)
    return len(found) - 1


def _merged(
    one: tuple[str, ...], other: tuple[str, ...], numbered: dict[str, int]
) -> tuple[str, ...]:
    """An order, as short as it may be, that has two orders in it."""
    found: list[str] = []
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    for kind, begin, end, other_begin, other_end in matcher.get_opcodes():
        theirs = () if kind == "equal" else other[other_begin:other_end]
        found += merge(one[begin:end], theirs, key=numbered.__getitem__)
    return tuple(found)


def _places(order: Sequence[str], joint: Sequence[str]) -> list[int | None]:
    """At each place of a joint order, the place in a rank's own; None where it ran no block."""
    found: list[int | None] = []
    at = 0
    for path in joint:
        is_there = at < len(order) and order[at] == path
        found.append(at if is_there else None)
        at += is_there
    return found


def _rising(epochs: tuple[int, ...]) -> tuple[int, ...]:
    """Counts that do not go down where one rank's takes over from another's."""
    return tuple(accumulate(epochs, max))


def worst_candidates(
    menus: Sequence[Sequence[Candidate]], own: Sequence[Candidate]
) -> list[Candidate]:
    """A rank's own candidates, each with the most that any rank measured of it."""
    return [
        replace(
            candidate,
            **{name: max(getattr(other, name) for other in others) for name in _MOST},
            input_freed=min(other.input_freed for other in others),
        )
        for candidate, *others in zip(own, *menus, strict=True)
    ]


def worst(profiles: Sequence[Profile], own: Profile) -> Profile:
    """A rank's own profile, with the most that any rank measured.

    The blocks of all are those of one joint order, with the same kinds and the same candidates.
    """
    if len(profiles) == 1:
        return own
    blocks = [
        _worst_block(blocks, mine)
        for mine, *blocks in zip(own.blocks, *(p.blocks for p in profiles), strict=True)
    ]
    return replace(
        own,
        **{name: max(getattr(p, name) for p in profiles) for name in _MOST_OF_STEP},
        bytes_per_second=min(p.bytes_per_second for p in profiles),
        blocks=tuple(blocks),
        between=_at_each(max, (p.between for p in profiles)),
        passed=_at_each(min, (p.passed for p in profiles)),
        cast_epochs=_at_each(max, (p.cast_epochs for p in profiles)),
        inputs=max((p.inputs for p in profiles), key=elements),
        recompute_peak=_most_known(p.recompute_peak for p in profiles),
        planning_peak=_most_known(p.planning_peak for p in profiles),
    )


def _worst_block(blocks: Sequence[BlockProfile], own: BlockProfile) -> BlockProfile:
    candidates = worst_candidates([block.candidates for block in blocks], own.candidates)
    least = min(block.output_freed for block in blocks)
    return replace(own, candidates=tuple(candidates), output_freed=least)


def _at_each(
    pick: Callable[[Iterable[int]], int], found: Iterable[tuple[int, ...]]
) -> tuple[int, ...]:
    """The most, or the least, at each place, of those that have any."""
    return tuple(map(pick, zip(*filter(None, found), strict=True)))


def _most_known(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def outline_of(profile: Profile) -> Any:
    """What the profiles of ranks have to have in common, so that there is one plan for all."""
    menus = [[(type(c.strategy), c.tier) for c in b.candidates] for b in profile.blocks]
    return profile.model, profile.order, menus
