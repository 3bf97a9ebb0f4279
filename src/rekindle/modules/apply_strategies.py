"""`apply` and `remove`: fates by module path, in place, with no module replaced."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from rekindle import policies
from rekindle.module_attachment import detach, discard, hooks_on, put_back, set_aside, take_off_new
from rekindle.modules import patterns
from rekindle.modules.blocks import blocks_of
from rekindle.modules.forward import Way, forward_of, noted, put, take_away
from rekindle.modules.wrappers import ActivationWrapper
from rekindle.offload.context import Offload, offload
from rekindle.policies import Policy
from rekindle.regions.selective.decisions import Decision, decision_named
from rekindle.regions.selective.eager_location import SelectiveCheckpointContext
from rekindle.regions.selective.offload_bridge import trim_fates
from rekindle.strategy import SavedIndices

What = str | Policy | Offload | SavedIndices
"""A fate by its name, a policy, or `rekindle.offload(...)` with options; or what plans give."""


@dataclass(frozen=True)
class Entry:
    """One module and what becomes of its activations."""

    path: str
    kind: str
    what: What


@dataclass(frozen=True)
class Applied:
    """What was applied to a model; prints as a tree."""

    model: str
    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        return format_applied(self)

    __repr__ = __str__


def format_applied(applied: Applied) -> str:
    """The modules that have fates, as a tree; those that are alike are one line."""
    return "\n".join([applied.model, *_lines(None, applied.entries, 1)])


def _lines(parents: list[Entry] | None, entries: tuple[Entry, ...], depth: int) -> list[str]:
    """The lines of what is right below some modules."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        parent = _parent(entry, entries)
        if (parent is None) if parents is None else (parent in parents):
            key = patterns.generalized(entry.path), entry.kind, entry.what
            groups.setdefault(key, []).append(entry)
    lines = []
    for members in groups.values():
        first = members[0]
        path = patterns.spanned([entry.path for entry in members])
        count = f"{len(members)} x " if len(members) > 1 else ""
        lines.append(
            f"{'  ' * depth}{path or '(itself)'}: {count}{first.kind}: {_told(first.what)}"
        )
        lines += _lines(members, entries, depth + 1)
    return lines


def _parent(entry: Entry, entries: tuple[Entry, ...]) -> Entry | None:
    """The nearest of the entries around one."""
    around = [
        other
        for other in entries
        if other is not entry and (not other.path or entry.path.startswith(f"{other.path}."))
    ]
    return max(around, key=lambda other: len(other.path), default=None)


def _told(what: What) -> str:
    return what if isinstance(what, str) else repr(what)


class FatesForModel(Protocol):
    """Knows what becomes of the modules of a model, as a plan does."""

    def fates(self, model: nn.Module) -> Mapping[str, What]:
        """By module path."""


def apply(model: nn.Module, what: What | Mapping[str, What] | FatesForModel) -> Applied:
    """Give the activations of a model's modules their fates, in place. `remove` undoes it.

    No module is replaced and no name, key, class or signature changes. Applying again replaces what
    was applied before; what is refused, or fails, changes nothing. Returns what is applied, which
    prints as a tree.

    >>> import torch, rekindle
    >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    >>> model = torch.nn.Sequential(*[block() for _ in range(4)])
    >>> rekindle.apply(model, "recompute")
    Sequential
      0-3: 4 x Sequential: recompute
    >>> rekindle.apply(model, {"[0-1]": "recompute", "3.0": "keep"})
    Sequential
      0-1: 2 x Sequential: recompute
      3.0: Linear: keep
    >>> rekindle.remove(model)

    Args:
        model: a model, or a part of one.
        what: a fate (`"keep"`, `"recompute"`, `"offload"`, `"spill"`), a policy, or
            `rekindle.offload(...)`, for every block of the model; or a mapping from patterns of
            module paths to these. The most specific pattern decides, also inside a module that
            another one names. Or a plan.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply() takes a model, but got {type(model).__name__}")
    given = what
    if hasattr(what, "fates"):
        what = what.fates(model)
    wanted = _wanted(model, what)
    _refuse_what_is_checkpointed(model, wanted)
    ways = _ways(wanted)
    with _all_or_nothing(model):
        for module, way in ways:
            put(module, way)
        if hasattr(given, "stand_on"):
            given.stand_on(model)
    shown = {id(module): path for path, (module, _) in reversed(wanted.items())}
    return Applied(
        type(model).__name__,
        tuple(
            Entry(path, type(module).__name__, what)
            for path, (module, what) in wanted.items()
            if shown[id(module)] == path
        ),
    )


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Around what is applied in the place of what is there: if it raises, all is as before."""
    modules = list(model.modules())
    forwards = [noted(module) for module in modules]
    hooks = hooks_on(model)
    aside = set_aside(model)
    try:
        for module in modules:
            take_away(module)
        yield
    except BaseException:
        for module, was in zip(modules, forwards, strict=True):
            detach(module)
            was.put_back()
        take_off_new(hooks)
        put_back(aside)
        raise
    discard(aside)


def remove(model: nn.Module) -> None:
    """Undo `apply`: every module of the model is as before.

    Host memory and disk that were set aside for it, and that nothing uses, are given back.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"remove() takes a model, but got {type(model).__name__}")
    offloads = {forward.way for module in model.modules() if (forward := forward_of(module))}
    undo(model)
    for way in offloads:
        if isinstance(way, Offload):
            way.trim()
    trim_fates()


def undo(model: nn.Module) -> None:
    """The same for a moment: what is set aside will be used again."""
    for module in model.modules():
        take_away(module)
        detach(module)


_Wanted = dict[str, tuple[nn.Module, What]]


def _wanted(model: nn.Module, what: Any) -> _Wanted:
    """The modules that are named, by path, each with what becomes of it."""
    if not isinstance(what, Mapping):
        return {path: (block, _checked(what)) for path, block in blocks_of(model).items()}
    modules = dict(model.named_modules(remove_duplicate=False))
    for pattern, fate in what.items():
        if not isinstance(pattern, str):
            raise TypeError(f"A pattern is a string, but got {pattern!r}")
        _checked(fate)
        _check_matches(pattern, modules)
    ordered = sorted(what, key=patterns.specificity, reverse=True)
    found: _Wanted = {}
    for path, module in modules.items():
        pattern = next((p for p in ordered if patterns.matches(path, p)), None)
        if pattern is not None and not _is_a_list(module):
            found[path] = module, what[pattern]
    _check_shared(found)
    return found


def _check_matches(pattern: str, modules: dict[str, nn.Module]) -> None:
    named = [module for path, module in modules.items() if patterns.matches(path, pattern)]
    if not named:
        raise patterns.no_match(pattern, modules)
    if all(map(_is_a_list, named)):
        raise ValueError(
            f"{pattern!r} names a list of modules, which is never called itself. "
            f"Did you mean '{pattern}.*'?"
        )


def _is_a_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _check_shared(wanted: _Wanted) -> None:
    first: dict[int, str] = {}
    for path, (module, what) in wanted.items():
        other = first.setdefault(id(module), path)
        if wanted[other][1] != what:
            raise ValueError(
                f"{other} and {path} are one module, but it is given two fates: "
                f"{_told(wanted[other][1])} and {_told(what)}"
            )


def _checked(what: Any) -> What:
    if isinstance(what, str):
        decision_named(what)
    elif not isinstance(what, Policy | Offload | SavedIndices):
        raise TypeError(
            "A module is given a fate (keep, recompute, offload, spill), a policy or "
            f"rekindle.offload(...), but got {type(what).__name__}"
        )
    checked: What = what
    return checked


def _refuse_what_is_checkpointed(model: nn.Module, wanted: _Wanted) -> None:
    """Say that a module is checkpointed already, rather than do it twice."""
    for path, (named, _) in wanted.items():
        around = [module for name, module in model.named_modules() if _is_around(name, path)]
        for module in [*around, *named.modules()]:
            if isinstance(module, ActivationWrapper):
                raise ValueError(
                    f"{path or type(model).__name__} is, contains or is in a "
                    f"{type(module).__name__}: unwrap it, or leave it out"
                )
            if getattr(module, "gradient_checkpointing", False) is True:
                raise ValueError(
                    f"{path or type(model).__name__} is checkpointed by the model itself "
                    f"({type(module).__name__}.gradient_checkpointing): call "
                    "gradient_checkpointing_disable() first"
                )


def _is_around(path: str, inner: str) -> bool:
    return path != inner and (not path or inner.startswith(f"{path}."))


_OFFLOADS: dict[Any, dict[str, Any]] = {
    "offload": {"quota": 1.0},
    "spill": {"tier": "disk", "quota": 1.0},
}
"""What each of these fates gives to `offload`, when it is applied: a folder is looked for then."""


def _ways(wanted: _Wanted) -> list[tuple[nn.Module, Way]]:
    """How each module runs, each once.

    Note [A fate inside another]. Inside modules that are recomputed, or have a policy, other fates
    are a matter of their policies: they drop what is not kept. Inside one that is offloaded a
    region is a region, and what is kept is kept from it.
    """
    ways: dict[int, tuple[nn.Module, Way]] = {}
    for path, (module, what) in wanted.items():
        around = [outer for outer in wanted if _is_around(outer, path)]
        is_part = any(_is_a_region(wanted[outer][1]) for outer in around)
        if is_part and what != "recompute":
            continue
        parts = [
            (inner.removeprefix(f"{path}.") if path else inner, part)
            for inner, (_, part) in wanted.items()
            if _is_around(path, inner) and part != "recompute"
        ]
        is_offloaded = any(_is_offload(wanted[outer][1]) for outer in around)
        way = _way(what, parts, is_offloaded)
        if way is not None:
            ways[id(module)] = module, way
    return list(ways.values())


def _is_offload(what: What) -> bool:
    return isinstance(what, Offload) or what in _OFFLOADS


def _is_a_region(what: What) -> bool:
    return isinstance(what, Policy) or what == "recompute"


def _way(what: What, parts: list[tuple[str, What]], is_offloaded: bool) -> Way | None:
    """How a module with some parts runs; None for as it is."""
    if isinstance(what, Policy) or (what == "recompute" and parts):
        own = what if isinstance(what, Policy) else policies.recompute()
        return _joined(own, parts)
    if isinstance(what, Offload | SavedIndices):
        return what
    if what == "keep":
        return "keep" if is_offloaded else None
    return "recompute" if what == "recompute" else offload(**_OFFLOADS[what])


def _joined(own: Policy, parts: list[tuple[str, What]]) -> Policy:
    """One policy for a module and the parts of it that have fates of their own."""
    joined: Policy | None = None
    for path, part in sorted(parts, key=lambda part: -part[0].count(".")):
        policy = Part(path, _as_policy(path, part))
        joined = policy if joined is None else joined | policy
    return own if joined is None else joined | own


def _as_policy(path: str, part: Any) -> Policy:
    if isinstance(part, Policy):
        return part | policies.recompute()
    if isinstance(part, Offload):
        return _offload_policy(path, part)
    if isinstance(part, SavedIndices):
        raise ValueError(
            f"{path} is inside a module that is recomputed or has a policy: there it cannot go by "
            "what autograd saves"
        )
    return {
        "keep": policies.keep(),
        "offload": policies.offload(),
        "spill": policies.spill(),
    }[part]


def _offload_policy(path: str, part: Offload) -> Policy:
    """What `rekindle.offload(...)` stands for inside a region; there it has fewer options."""
    tier, size = part.strategy.tier, part.strategy.min_bytes
    if part != offload(tier=tier, quota=1.0, min_bytes=size, derive=part.strategy.derive):
        raise ValueError(
            f"{path} is inside a module that is recomputed or has a policy: there, of the options "
            f"of offload only tier and min_bytes count, but got {part!r}"
        )
    return Larger(size, "spill" if tier == "disk" else "offload")


@dataclass(frozen=True)
class Larger(Policy):
    """A fate for results from a size on; smaller ones are kept."""

    min_bytes: int
    then: str

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        return decision_named(self.then) if ctx.nbytes >= self.min_bytes else Decision.KEEP


@dataclass(frozen=True)
class Part(Policy):
    """A policy for a part of the module whose forward is the region, by its path from there."""

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
