"""Which modules inside a block to recompute: those that free most bytes for the least replay.

A module that is recomputed holds what it is given, drops what autograd saves in it, and runs again
in backward. An activation function that is written as eight ops, or a norm that computes in
float32, saves several times what it is given, and takes next to no time to run again. No op is
looked at, so the host has little more to do than without; that is what sets of results to keep
(`keep_sets.py`) cannot offer.

Sets are found greedily, as in Dantzig's method for the knapsack problem (1957): beginning with
none, the module that frees the most bytes for each second of replay is added again and again, in
place of the modules inside it. Modules whose paths differ in numbers alone, such as experts, go
together. For each size, the set counts that leaves the least to replay, of those on the way and of
each module alone. Other sets, of modules that are each worth less, can be better for a size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rekindle.modules.patterns import generalized, is_inside
from rekindle.planner.types import BlockTrace

LEVELS = (0.8, 0.65, 0.5, 0.35, 0.2)
"""Shares of the bytes that plain autograd holds, for each of which a set is wanted."""
_REGION_SECONDS = 1e-4
"""Seconds that the host takes for a region, about."""
_LEAST_GAIN = 0.02
"""Share of the bytes that plain autograd holds which a module has to free."""
_MOST_OF_BLOCK = 0.8
"""Share of the block's time that a replay may take: more is next to the whole block's."""
_MOST_PARTS = 64
"""Parts that are tried: of more, those that free the most bytes for their time."""


@dataclass(frozen=True)
class ModuleSet:
    """Modules that are recomputed, with what that leaves held and takes: bytes and seconds."""

    modules: tuple[str, ...]
    held: int
    replay: float


def module_sets(trace: BlockTrace) -> list[ModuleSet]:
    """Sets of modules to recompute, from few to many: at most one for each of the `LEVELS`."""
    alone = _worthwhile(trace)
    pool = [found for _, found in alone] + _chain(trace, [part for part, _ in alone])
    best: list[ModuleSet] = []
    for share in LEVELS:
        fitting = [found for found in pool if found.held <= share * trace.saved_bytes]
        best += [min(fitting, key=lambda found: found.replay)] if fitting else []
    return list(dict.fromkeys(best))


def given_to(trace: BlockTrace, modules: Iterable[str]) -> frozenset[int]:
    """The values that some modules are given, and that the block made outside of each of them."""
    return frozenset().union(*(_part(trace, (module,)).given for module in modules))


@dataclass(frozen=True)
class _Part:
    """Modules that are recomputed together, or not at all."""

    modules: tuple[str, ...]
    saves: frozenset[int]
    """Indices of the tensors that are saved in them."""
    given: frozenset[int]
    """The values that each of them is given."""
    ops: frozenset[int]
    """Indices of the ops that they run."""


def _part(trace: BlockTrace, modules: tuple[str, ...]) -> _Part:
    ops = [i for i, op in enumerate(trace.ops) if _is_in(op.module, modules)]
    given = {
        v
        for module in modules
        for i in ops
        if _is_in(trace.ops[i].module, (module,))
        for v in trace.ops[i].inputs
        if not _is_in(trace.values[v].module, (module,))
    }
    saves = (i for i, path in enumerate(trace.saved_in) if _is_in(path, modules))
    return _Part(modules, frozenset(saves), frozenset(given), frozenset(ops))


def _parts(trace: BlockTrace) -> list[_Part]:
    """The modules of a block, those together whose paths differ in numbers alone."""
    groups: dict[str, list[str]] = {}
    for path in trace.called:
        groups.setdefault(generalized(path), []).append(path)
    return [_part(trace, tuple(sorted(paths))) for paths in groups.values()]


def _worthwhile(trace: BlockTrace) -> list[tuple[_Part, ModuleSet]]:
    """The parts that are worth recomputing alone, those that free the most for their time first."""
    nothing = _set_of(trace, [])
    found = [(part, _set_of(trace, [part])) for part in _parts(trace)]
    found = [(part, alone) for part, alone in found if _is_worth(trace, nothing, alone)]
    found.sort(key=lambda each: _density(nothing, each[1]), reverse=True)
    return found[:_MOST_PARTS]


def _chain(trace: BlockTrace, parts: Sequence[_Part]) -> list[ModuleSet]:
    """Sets of more and more parts, each with the one more that frees the most for its time."""
    chosen: list[_Part] = []
    now = _set_of(trace, chosen)
    chain: list[ModuleSet] = []
    while True:
        tried = [(part, _set_of(trace, [*chosen, part])) for part in parts if part not in chosen]
        worth = [(part, after) for part, after in tried if _is_worth(trace, now, after)]
        if not worth:
            return chain
        before = now
        part, now = max(worth, key=lambda each: _density(before, each[1]))
        chosen.append(part)
        chain.append(now)


def _is_worth(trace: BlockTrace, before: ModuleSet, after: ModuleSet) -> bool:
    """True if a set frees more than another one by enough, and leaves out much of the block."""
    seconds = sum(op.seconds for op in trace.ops)
    replay = after.replay - _REGION_SECONDS * len(after.modules)
    gain = before.held - after.held
    return gain >= max(_LEAST_GAIN * trace.saved_bytes, 1) and replay <= _MOST_OF_BLOCK * seconds


def _set_of(trace: BlockTrace, parts: Sequence[_Part]) -> ModuleSet:
    """The set of modules of some parts; a module takes the place of those inside it."""
    paths = [path for part in parts for path in part.modules]
    modules = sorted(p for p in paths if not any(is_inside(p, other) for other in paths))
    dropped = frozenset[int]().union(*(part.saves for part in parts))
    ops = frozenset[int]().union(*(part.ops for part in parts))
    outermost = [part for part in parts if not set(part.modules).isdisjoint(modules)]
    held = frozenset[int]().union(*(part.given for part in outermost)) | {
        v for i, v in enumerate(trace.saved_tensors) if v is not None and i not in dropped
    }
    return ModuleSet(
        tuple(modules),
        sum(trace.values[v].nbytes for v in held),
        sum(trace.ops[i].seconds for i in ops) + _REGION_SECONDS * len(modules),
    )


def _is_in(path: str, modules: Iterable[str]) -> bool:
    """Return whether a path is one of some modules, or inside of one."""
    return any(path == module or is_inside(path, module) for module in modules)


def _density(before: ModuleSet, after: ModuleSet) -> float:
    """Bytes that are freed for each further second of replay."""
    return (before.held - after.held) / max(after.replay - before.replay, 1e-9)
