"""Candidates of a block that are worth measuring, from its trace: pure functions, without torch.

A candidate names ops by their addresses, or saved tensors by their indices; its costs are filled in
where it is measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rekindle.planner import keep_sets, module_sets
from rekindle.planner.module_sets import ModuleSet
from rekindle.planner.op_words import word_of
from rekindle.planner.types import BlockTrace, Candidate, Profile, TracedOp
from rekindle.strategy import (
    Compiled,
    Keep,
    NumberedOps,
    OpAddress,
    PlannedOps,
    Recompute,
    RecomputeInTiles,
    SavedIndices,
    Selective,
    Strategy,
    TierName,
)

SMALL = 1 / 8
"""Share of what all blocks save that small blocks save together, at most."""


def candidates(trace: BlockTrace, *, is_small: bool = False) -> tuple[Candidate, ...]:
    """The candidates of a block that are worth measuring, the first of which keeps all.

    A small block, as the first layer is that differs from the others in its input, or a stage at
    the end of a pyramid, has few: none that recompute modules inside it, and of those that go op by
    op only the one that holds least, so that the least budget is what it would be. What it could
    save by the others is a few thousandths of a step, and each of them takes several runs.
    """
    modules = [] if is_small else module_sets.module_sets(trace)
    kept = keep_sets.keep_sets(trace)
    return (
        Candidate(Keep()),
        Candidate(Recompute()),
        *recomputing_saved(trace.recomputable, trace),
        *(recomputing_modules(each, trace) for each in modules),
        *(selecting(each, trace) for each in (kept[-1:] if is_small else kept)),
    )


BUDGETS = (0.75, 0.5, 0.25, 0.1, 0.0)
"""Shares of what its graphs save without a plan that a compiled block may save."""


def compiled_candidates() -> tuple[Candidate, ...]:
    """The candidates of a compiled block that move nothing, the first of which keeps all.

    Each budget is one more compilation of a distinct block.
    """
    budgets = (Candidate(Compiled(budget)) for budget in BUDGETS)
    return Candidate(Keep()), Candidate(Recompute()), *budgets


def keeping_saved_at(candidate: Candidate, trace: BlockTrace) -> Candidate:
    """A candidate of a compiled block, going by the indices of what its graphs save.

    `trace` is that of the block with the candidate's graphs.
    """
    saved = SavedIndices(count=len(trace.saved_tensors))
    match candidate.strategy:
        case Compiled() as strategy:
            return replace(candidate, strategy=replace(strategy, inner=saved))
    return replace(candidate, strategy=saved)


def in_tiles(modules: tuple[str, ...]) -> tuple[Candidate, ...]:
    """Candidates that recompute a block with some of its modules in tiles of tokens."""
    return tuple(Candidate(RecomputeInTiles(modules, n)) for n in _CHUNKS if modules)


_CHUNKS = (4, 16)
"""Tiles of a module: few, and so many that what is inside hardly counts."""
_LEAST_GAIN = 0.05
"""Share of a replay's peak that tiles have to save."""


def with_useful_tiles(candidates: Iterable[Candidate]) -> list[Candidate]:
    """A block's candidates, without tiles whose replay peaks as high as that of the whole block."""
    found = list(candidates)
    peaks = [each.backward_peak for each in found if each.strategy == Recompute()]
    limit = (1 - _LEAST_GAIN) * max(peaks, default=0)
    return [
        each
        for each in found
        if not isinstance(each.strategy, RecomputeInTiles) or each.backward_peak < limit
    ]


def recomputing_saved(derivable: tuple[int, ...], trace: BlockTrace) -> list[Candidate]:
    """Candidates that make saved tensors again, each by one op: the large ones, and all.

    Args:
        derivable: indices of the saved tensors that one op makes again from others.
        trace: the block's trace.
    """
    sizes = {
        index: trace.values[v].nbytes
        for index in derivable
        if (v := trace.saved_tensors[index]) is not None
    }
    large = tuple(i for i, nbytes in sizes.items() if 2 * nbytes >= max(sizes.values()))
    sets = dict.fromkeys((large, derivable))
    return [keeping_saved(trace, indices) for indices in sets if indices]


def keeping_saved(trace: BlockTrace, recomputed: tuple[int, ...] = ()) -> Candidate:
    """The candidate that keeps saved tensors by their index, but for some that it makes again."""
    return Candidate(SavedIndices(tuple(sorted(recomputed)), count=len(trace.saved_tensors)))


def recomputing_modules(chosen: ModuleSet, trace: BlockTrace) -> Candidate:
    """The candidate that recomputes some modules, and outside of them what one op makes again."""
    outside = trace.saved_outside(chosen.modules)
    recomputed = (
        place
        for place, index in enumerate(outside)
        if index in trace.recomputable and not _is_made_in(trace, index, chosen.modules)
    )
    return Candidate(SavedIndices(tuple(recomputed), count=len(outside), modules=chosen.modules))


def _is_made_in(trace: BlockTrace, index: int, modules: tuple[str, ...]) -> bool:
    """True if a saved tensor is made in one of some modules."""
    v = trace.saved_tensors[index]
    made_in = "" if v is None else trace.values[v].module
    return any(made_in == module or made_in.startswith(f"{module}.") for module in modules)


def selecting(kept: Iterable[int], trace: BlockTrace) -> Candidate:
    """The candidate that keeps the results of some ops, by number, and recomputes the others."""
    chosen = set(kept)
    return Candidate(_selective([op for op in trace.ops if op.number in chosen], []))


def _selective(
    kept: Sequence[TracedOp],
    offloaded: Sequence[TracedOp],
    tier: TierName = "host",
    *,
    moves_input: bool = False,
) -> Selective:
    """The strategy for some ops: by their addresses; by number if the trace has none."""
    if any(op.address is None for op in (*kept, *offloaded)):
        return Selective(NumberedOps(_numbers(kept), _numbers(offloaded), tier))
    return Selective(PlannedOps(_addresses(kept), _addresses(offloaded), tier, moves_input))


def _numbers(ops: Sequence[TracedOp]) -> tuple[int, ...]:
    return tuple(sorted(op.number for op in ops))


def _addresses(ops: Sequence[TracedOp]) -> tuple[OpAddress, ...]:
    return tuple(sorted(op.address for op in ops if op.address is not None))


def ops_among(named: Iterable[OpAddress | int], trace: BlockTrace) -> list[TracedOp]:
    """The ops of a trace that have one of some addresses or numbers."""
    wanted = set(named)
    return [op for op in trace.ops if op.address in wanted or op.number in wanted]


def offloading(
    candidate: Candidate,
    trace: BlockTrace,
    host_seconds: tuple[float, float] = (0.0, 0.0),
    tier: TierName = "host",
) -> list[Candidate]:
    """Candidates that move some of what one keeps: the largest result, the two largest, up to all.

    If it recomputes, the block's input is one of these; and is moved alone, too. Their times are
    those of the candidate, and the host's for each result that is moved. Whether the link keeps up
    shows on the timeline, where blocks are put together.

    Args:
        candidate: a measured candidate that keeps some results and moves none.
        trace: the block's trace.
        host_seconds: host time to copy one result out, and to copy it back.
        tier: where results are moved to.
    """
    sizes = _movable(candidate, trace)
    inputs = {key for key in sizes if key == _INPUT or _are_of_input(key, trace)}  # not made by it
    worth = max(sum(sizes.values()) // 100, 1)
    largest = sorted((key for key, size in sizes.items() if size >= worth), key=lambda k: -sizes[k])
    sets = [largest[:count] for count in range(1, len(largest) + 1)]
    if len(sets) > _MOVES:
        sets = [*sets[:_MOVES], sets[-1]]
    sets += [[key] for key in inputs if largest[0] != key]
    found = []
    for chosen in sets:
        count = len(chosen)
        away = [index for indices in chosen for index in indices]
        moved = sum(sizes[indices] for indices in chosen)
        own_input = sum(sizes[indices] for indices in chosen if indices in inputs)
        found.append(
            replace(
                candidate,
                strategy=_moving(candidate.strategy, away, trace, tier),
                bytes_held=max(candidate.bytes_held - (moved - own_input), 0),
                input_freed=candidate.input_freed + own_input,
                bytes_moved=moved,
                backward_peak=candidate.backward_peak + moved,
                forward_host_seconds=candidate.forward_host_seconds + count * host_seconds[0],
                backward_host_seconds=candidate.backward_host_seconds + count * host_seconds[1],
                largest_moved=max(sizes[indices] for indices in chosen),
            )
        )
    return found


_INPUT = (-1,)
"""The key of the block's input among the results that may be moved; no op has this number."""
_MOVES = 6
"""How many of the largest results are moved one by one, before all of them are."""


def _are_of_input(places: tuple[int, ...], trace: BlockTrace) -> bool:
    """True if saved tensors at some places, of a compiled block, are what it was given."""
    v = trace.saved_tensors[places[0]] if places[0] < len(trace.saved_tensors) else None
    return v is not None and trace.values[v].is_input


def _moving(
    strategy: Strategy, away: list[int], trace: BlockTrace, tier: TierName
) -> Selective | SavedIndices | Compiled:
    """A strategy with some results moved: saved tensors, or ops by their number."""
    match strategy:
        case Compiled(inner=inner):
            return replace(strategy, inner=_moving(inner, away, trace, tier))
        case SavedIndices() as strategy:
            return replace(strategy, offloaded=tuple(sorted(away)), tier=tier)
        case Selective(policy=PlannedOps(kept=kept) | NumberedOps(kept=kept)):
            ops = ops_among(kept, trace)
            stays = [op for op in ops if op.number not in away]
            moved = [op for op in ops if op.number in away]
            return _selective(stays, moved, tier, moves_input=_INPUT[0] in away)
    raise AssertionError(f"{strategy} keeps no results that could be moved")


def _movable(candidate: Candidate, trace: BlockTrace) -> dict[tuple[int, ...], int]:
    """Bytes of each result that may be moved: by saved indices, or by the number of its op."""
    values = trace.values
    match candidate.strategy:
        case Compiled(inner=inner):
            return _movable(replace(candidate, strategy=inner), trace)
        case SavedIndices(recomputed=recomputed, modules=modules):
            indices: dict[int, list[int]] = {}
            given = module_sets.given_to(trace, modules)  # which their regions hold
            for place, index in enumerate(trace.saved_outside(modules)):
                v = trace.saved_tensors[index]
                if v is None or v in given or values[v].changes:
                    continue
                if values[v].maker is None and not values[v].is_input:
                    continue
                indices.setdefault(v, []).append(place)
            return {
                tuple(found): values[v].nbytes
                for v, found in indices.items()
                if not set(found) & set(recomputed)
            }
        case Selective(policy=PlannedOps(kept=kept) | NumberedOps(kept=kept) as policy):
            found: dict[tuple[int, ...], int] = {
                (op.number,): sum(values[v].nbytes for v in op.outputs if v in trace.saved)
                for op in ops_among(kept, trace)
                if not any(values[v].changes for v in op.outputs)
            }
            holds_input = trace.input_bytes and not candidate.input_freed
            if holds_input and isinstance(policy, PlannedOps):
                found[_INPUT] = trace.input_bytes
            return found
    return {}


def with_names(candidate: Candidate, trace: BlockTrace) -> Candidate:
    """A candidate with words for the ops whose results it keeps, moves and makes again."""
    largest_first = sorted(
        trace.ops, key=lambda op: -sum(trace.values[v].nbytes for v in op.outputs)
    )

    def words(ops: Iterable[TracedOp]) -> tuple[str, ...]:
        numbers = {op.number for op in ops}
        return tuple(word_of(op.name) for op in largest_first if op.number in numbers)

    def makers(places: Iterable[int], modules: tuple[str, ...]) -> list[TracedOp]:
        outside = trace.saved_outside(modules)
        found = (trace.saved_tensors[outside[place]] for place in places)
        return [
            trace.ops[maker]
            for v in found
            if v is not None and (maker := trace.values[v].maker) is not None
        ]

    match candidate.strategy:
        case Compiled(inner=inner):
            inside = with_names(replace(candidate, strategy=inner), trace)
            made = (op for op in trace.ops if not any(trace.values[v].is_input for v in op.outputs))
            return replace(inside, strategy=candidate.strategy, kept_names=words(made))
        case SavedIndices(recomputed=recomputed, offloaded=offloaded, modules=modules):
            return replace(
                candidate,
                recomputed_names=words(makers(recomputed, modules)),
                offloaded_names=words(makers(offloaded, modules)),
            )
        case Selective(
            policy=PlannedOps(kept=kept, offloaded=offloaded)
            | NumberedOps(kept=kept, offloaded=offloaded)
        ):
            return replace(
                candidate,
                kept_names=words(ops_among(kept, trace)),
                offloaded_names=words(ops_among(offloaded, trace)),
            )
    return candidate


def with_casts(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """A block's candidates, each with the bytes of weight casts that it holds itself.

    Where all is recomputed, only autocast's cache holds casts: what it holds then is all of them.
    """
    casts = max(candidate.casts_cached for candidate in candidates)
    return tuple(replace(each, casts_held=casts - each.casts_cached) for each in candidates)


def recomputing_all(profile: Profile) -> list[Candidate]:
    """The candidate of each block of a step that recomputes all of it."""
    menus = (profile.candidates(i) for i in range(len(profile.order)))
    return [next(each for each in menu if each.strategy == Recompute()) for menu in menus]


def undominated(candidates: list[Candidate]) -> list[Candidate]:
    """The candidates without those that another of the same kind makes pointless.

    Note [What may be pruned]. Seconds are noisy and bytes are not. So a candidate goes only if
    another one of its kind takes no more bytes of any sort and is faster by more than both
    measurements are uncertain; of several that take exactly the same bytes, the fastest stays.
    Then, whatever the clock said, for each candidate that was measured one is left that needs no
    more memory: the least budget of a profile depends on bytes alone. Kinds are apart because plans
    are made without offload, too, and without going op by op: such a plan finds all of its
    candidates.
    """
    ranks = [(candidate.seconds, place) for place, candidate in enumerate(candidates)]
    return [
        candidate
        for candidate, rank in zip(candidates, ranks, strict=True)
        if candidate.strategy in (Keep(), Recompute())
        or not any(
            kind_of_candidate(other) == kind_of_candidate(candidate)
            and (
                other_rank < rank
                if _sizes(other) == _sizes(candidate)
                else _beats(other, candidate)
            )
            for other, other_rank in zip(candidates, ranks, strict=True)
        )
    ]


def kind_of_candidate(candidate: Candidate) -> tuple[type, bool, TierName | None]:
    """The class of a candidate's strategy, whether it moves results, and where to."""
    return type(candidate.strategy), candidate.bytes_moved > 0, candidate.tier


def _beats(other: Candidate, candidate: Candidate) -> bool:
    """Returns whether one takes no more bytes than another, and less time beyond doubt."""
    if any(theirs > own for theirs, own in zip(_sizes(other), _sizes(candidate), strict=True)):
        return False
    noise = other.seconds_noise + candidate.seconds_noise
    gains = [own - theirs for theirs, own in zip(_times(other), _times(candidate), strict=True)]
    return max(gains) > noise and min(gains) >= -noise


def _sizes(candidate: Candidate) -> tuple[int, ...]:
    """All bytes that decide how much memory a step by the candidate needs."""
    held = candidate.bytes_held
    return (
        held,
        held - candidate.input_freed,
        held + candidate.casts_cached,
        candidate.bytes_moved,
        candidate.largest_moved,
        candidate.forward_peak,
        candidate.backward_peak,
    )


def _times(candidate: Candidate) -> tuple[float, float]:
    """Seconds of the device, and of the host."""
    return (
        candidate.forward_seconds + candidate.backward_seconds,
        candidate.forward_host_seconds + candidate.backward_host_seconds,
    )
