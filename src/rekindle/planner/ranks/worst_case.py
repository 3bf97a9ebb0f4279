"""Merges traces and profiles of several ranks: at each place, the most that any rank has.

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
from typing import Any

from rekindle.planner.input_shapes import count_elements
from rekindle.planner.rest import FIELDS, Rest
from rekindle.planner.types import BlockKey, BlockProfile, Candidate, Profile, StepTrace

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
    "rest_host_seconds",
    "first_peak",
    "last_peak",
    "cached_rest_peak",
    "casts_in_backward",
    "output_held",
)


@dataclass(frozen=True)
class MergedTrace:
    """One forward that runs all blocks that the forwards of several ranks ran.

    The fields are as in `StepTrace`, each number the worst of all ranks'.
    """

    order: tuple[str, ...]
    indices: dict[str, int]
    """The index of each path's distinct block: it has one key on each rank that ran it."""
    keys: tuple[BlockKey, ...]
    """The key of each distinct block, on the first rank that ran it."""
    between: tuple[int, ...]
    passed: tuple[int, ...]
    cast_epochs: tuple[int, ...]
    seconds: float


def merge_traces(traces: Sequence[StepTrace], blocks: Iterable[str]) -> MergedTrace:
    """Merge the ranks' traces: each rank's order is kept, and else the order of the model."""
    order, model_order = traces[0].order, {path: i for i, path in enumerate(blocks)}
    for trace in traces[1:]:
        order = _merged_order(order, trace.order, model_order)
    indices: dict[str, int] = {}
    distinct: list[list[BlockKey | None]] = []
    for path in order:
        if path not in indices:
            indices[path] = _distinct_index(distinct, [trace.keys.get(path) for trace in traces])
    places = [places_in(trace.order, order) for trace in traces]

    def merged(pick: Callable[[Iterable[int]], int], name: str) -> tuple[int, ...]:
        own = [(getattr(trace, name), at) for trace, at in zip(traces, places, strict=True)]
        return tuple(
            pick([values[at[i]] for values, at in own if values and at[i] is not None] or [0])
            for i in range(len(order))
        )

    return MergedTrace(
        order,
        indices,
        tuple(next(key for key in keys if key is not None) for keys in distinct),
        between=merged(max, "between"),
        passed=merged(min, "passed"),
        cast_epochs=_rising(merged(max, "cast_epochs")),
        seconds=max(trace.seconds for trace in traces),
    )


def _distinct_index(distinct: list[list[BlockKey | None]], own: list[BlockKey | None]) -> int:
    """Return the index of a distinct block, by its key on each rank; None where it did not run.

    A block that is like none of those so far is added to them.
    """
    for index, keys in enumerate(distinct):
        pairs = list(zip(own, keys, strict=True))
        equal = [one == other for one, other in pairs if one is not None and other is not None]
        if equal and all(equal):
            distinct[index] = [other if one is None else one for one, other in pairs]
            return index
    distinct.append(own)
    return len(distinct) - 1


def _merged_order(
    one: tuple[str, ...], other: tuple[str, ...], model_order: dict[str, int]
) -> tuple[str, ...]:
    """Return an order, as short as possible, that contains two orders."""
    found: list[str] = []
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    for kind, begin, end, other_begin, other_end in matcher.get_opcodes():
        theirs = () if kind == "equal" else other[other_begin:other_end]
        found += merge(one[begin:end], theirs, key=model_order.__getitem__)
    return tuple(found)


def places_in(order: Sequence[str], merged: Sequence[str]) -> list[int | None]:
    """Return, for each place of a merged order, the place in a rank's own; None if it has none."""
    found: list[int | None] = []
    at = 0
    for path in merged:
        is_there = at < len(order) and order[at] == path
        found.append(at if is_there else None)
        at += is_there
    return found


def _rising(epochs: tuple[int, ...]) -> tuple[int, ...]:
    """Return counts that do not go down where one rank's follows another's."""
    return tuple(accumulate(epochs, max))


def worst_candidates(
    by_rank: Sequence[Sequence[Candidate]], own: Sequence[Candidate]
) -> list[Candidate]:
    """A rank's own candidates, each with the most that any rank measured of it."""
    return [
        replace(
            candidate,
            **{name: max(getattr(other, name) for other in others) for name in _MOST},
            input_freed=min(other.input_freed for other in others),
        )
        for candidate, *others in zip(own, *by_rank, strict=True)
    ]


def worst_case(profiles: Sequence[Profile], own: Profile) -> Profile:
    """Return a rank's own profile, with the most that any rank measured.

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
        waiting=_at_each(max, (p.waiting for p in profiles)),
        cast_epochs=_at_each(max, (p.cast_epochs for p in profiles)),
        inputs=max((p.inputs for p in profiles), key=count_elements),
        recompute_peak=_most_known(p.recompute_peak for p in profiles),
        recompute_seconds=_most_known(p.recompute_seconds for p in profiles),
        planning_peak=_most_known(p.planning_peak for p in profiles),
        tier_bytes=_least_known(p.tier_bytes for p in profiles),
        rests=tuple(map(_worst_rest, zip(*(p.rests for p in profiles), strict=True))),
    )


def _worst_rest(rests: Sequence[Rest]) -> Rest:
    """Return one way to run the heads, with the most that any rank measured."""
    return replace(
        rests[0],
        **{name: _most_known(getattr(rest, name) for rest in rests) for name in FIELDS},
    )


def _worst_block(blocks: Sequence[BlockProfile], own: BlockProfile) -> BlockProfile:
    candidates = worst_candidates([block.candidates for block in blocks], own.candidates)
    least = min(block.output_freed for block in blocks)
    return replace(own, candidates=tuple(candidates), output_freed=least)


def _at_each(
    pick: Callable[[Iterable[int]], int], found: Iterable[tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the most, or the least, at each place, of the ranks that have numbers."""
    return tuple(map(pick, zip(*filter(None, found), strict=True)))


def _most_known(values: Iterable[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)


def _least_known(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def shape_of_profile(profile: Profile) -> Any:
    """Return the parts that profiles of ranks have in common if one plan is to fit all."""
    kinds = [[(type(c.strategy), c.tier) for c in b.candidates] for b in profile.blocks]
    rests = [rest.heads for rest in profile.rests]
    return profile.model, profile.order, kinds, rests
