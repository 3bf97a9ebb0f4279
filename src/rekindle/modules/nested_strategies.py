"""Strategies of modules inside other modules: which strategy each module runs by.

Note [A strategy inside another]. A region that is recomputed or has a policy drops what its policy
does not keep, so the strategies of modules inside it become part of its policy. A module that is
recomputed is a region of its own there. Inside a module that is offloaded, a region stays a region,
and a module that keeps its activations is exempt from the offloading. A module that runs in tiles
does so inside a region that is recomputed, too: its input is what the region holds of it. A head
inside a region runs as it is, and so does whatever follows it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rekindle import policies
from rekindle.modules.patterns import is_inside
from rekindle.modules.strategy_engines import offload_context, runnable_policy
from rekindle.policies import Policy
from rekindle.regions.selective.decisions import Decision
from rekindle.regions.selective.eager_location import SelectiveCheckpointContext
from rekindle.strategy import (
    Keep,
    Offload,
    Recompute,
    RecomputeInTiles,
    Rows,
    SavedIndices,
    Selective,
    Strategy,
    Tile,
)


def strategies_to_run(wanted: Mapping[str, Strategy]) -> dict[str, Strategy]:
    """The strategies by which modules run, of those that users gave, by module path.

    A module that is left out runs as it is: Note [A strategy inside another].
    """
    run: dict[str, Strategy] = {}
    for path, strategy in wanted.items():
        around = [wanted[outer] for outer in wanted if is_inside(path, outer)]
        if isinstance(strategy, Tile | Rows):
            _check_split(path, strategy, around)
            run[path] = strategy
            continue
        if any(map(_is_region, around)) and not isinstance(strategy, Recompute):
            continue
        parts = {
            inner.removeprefix(f"{path}.") if path else inner: part
            for inner, part in wanted.items()
            if is_inside(inner, path) and not isinstance(part, Recompute | Tile | Rows)
        }
        if _is_region(strategy) and parts:
            run[path] = _joined(strategy, parts)
        elif not isinstance(strategy, Keep) or any(isinstance(each, Offload) for each in around):
            run[path] = strategy
    return run


def _check_split(path: str, strategy: Tile | Rows, around: list[Strategy]) -> None:
    """Raise a `ValueError` for a module that cannot run in tiles, or by rows, where it is."""
    where = path or "the model"
    if isinstance(strategy, Tile) and strategy.inner != Recompute():
        raise ValueError(
            f"{where} is given {strategy!r}: a tile is recomputed, so inner=Recompute() is the "
            "only one there is"
        )
    if any(isinstance(each, Selective) for each in around):
        raise ValueError(
            f"{where} is given {strategy!r} inside a module that has a policy: a policy decides "
            "for each op, and a module that runs in parts has other ops. Recompute the module "
            "around it, or leave one of the two out"
        )


def _is_region(strategy: Strategy) -> bool:
    return isinstance(strategy, Recompute | RecomputeInTiles | Selective)


def _joined(own: Strategy, parts: Mapping[str, Strategy]) -> Selective:
    """One policy for a module and for the modules inside it that have strategies of their own."""
    joined: Policy | None = None
    for path, part in sorted(parts.items(), key=lambda item: -item[0].count(".")):
        policy = Inside(path, _as_policy(path, part))
        joined = policy if joined is None else joined | policy
    rest = runnable_policy(own.policy) if isinstance(own, Selective) else policies.recompute()
    return Selective(rest if joined is None else joined | rest)


def _as_policy(path: str, part: Strategy) -> Policy:
    """The policy that does inside a region what a strategy does outside."""
    if isinstance(part, Selective):
        return runnable_policy(part.policy) | policies.recompute()
    if isinstance(part, Offload):
        return _offload_policy(path, part)
    if isinstance(part, SavedIndices):
        raise ValueError(
            f"{path} is inside a module that is recomputed or has a policy: there it cannot go by "
            "what autograd saves"
        )
    assert isinstance(part, Keep), "all others are handled before"
    return policies.keep()


def _offload_policy(path: str, part: Offload) -> Policy:
    """The policy for `rekindle.offload(...)` inside a region, where it has fewer options."""
    then = "spill" if part.tier == "disk" else "offload"
    if part == Offload(tier=part.tier, quota=1.0):
        return policies.spill() if then == "spill" else policies.offload()
    as_it_runs = Offload(part.tier, 1.0, part.min_bytes, derive=part.derive)
    if offload_context(part) != offload_context(as_it_runs):
        raise ValueError(
            f"{path} is inside a module that is recomputed or has a policy: there, of the options "
            f"of offload only tier and min_bytes count, but got {part}"
        )
    return Larger(part.min_bytes or 0, then)


@dataclass(frozen=True)
class Larger(Policy):
    """A decision for results from a size on; smaller ones are kept."""

    min_bytes: int
    then: str

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        return Decision(self.then) if ctx.nbytes >= self.min_bytes else Decision.KEEP


@dataclass(frozen=True)
class Inside(Policy):
    """A policy for a module inside the one whose forward is the region, by its path from there."""

    path: str
    then: Policy

    def _is_there(self, ctx: SelectiveCheckpointContext) -> bool:
        path = ctx.path_in_region
        return path is not None and (path == self.path or path.startswith(f"{self.path}."))

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        return self.then.decide(ctx) if self._is_there(ctx) else None

    def decide_named(self, name: str, ctx: SelectiveCheckpointContext) -> Decision | None:
        return self.then.decide_named(name, ctx) if self._is_there(ctx) else None

    def keeps_inputs(self, ctx: SelectiveCheckpointContext) -> bool:
        return self._is_there(ctx) and self.then.keeps_inputs(ctx)

    def __repr__(self) -> str:
        return f"<in {self.path}: {self.then!r}>"
