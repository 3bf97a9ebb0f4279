"""`apply` and `remove`: fates by module path, in place, with no module replaced."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from rekindle import policies
from rekindle.modules import patterns
from rekindle.modules.blocks import blocks_of
from rekindle.modules.forward import Way, put, take_away
from rekindle.modules.wrappers import ActivationWrapper
from rekindle.offload.context import Offload, offload
from rekindle.policies import Policy, at
from rekindle.selective.fates import Fate, fate_named

What = str | Policy | Offload
"""A fate by its name, a policy, or `rekindle.offload(...)` with options."""


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
    """The modules that have fates, as a tree; neighbours that are alike are one line."""
    lines = [applied.model]
    groups: list[tuple[str, list[Entry]]] = []
    for entry in applied.entries:
        general = patterns.generalized(entry.path)
        for name, members in groups:
            if name == general and _alike(members[0], entry):
                members.append(entry)
                break
        else:
            groups.append((general, [entry]))
    for _, members in groups:
        path = patterns.spanned([entry.path for entry in members])
        first = members[0]
        count = f"{len(members)} x " if len(members) > 1 else ""
        indent = "  " * (1 + _depth(first, applied.entries))
        lines.append(f"{indent}{path or '(itself)'}: {count}{first.kind}: {_told(first.what)}")
    return "\n".join(lines)


def _alike(one: Entry, other: Entry) -> bool:
    return (one.kind, one.what) == (other.kind, other.what)


def _depth(entry: Entry, entries: tuple[Entry, ...]) -> int:
    """How many of the entries this one is inside of."""
    return sum(
        other is not entry and (not other.path or entry.path.startswith(f"{other.path}."))
        for other in entries
    )


def _told(what: What) -> str:
    return what if isinstance(what, str) else repr(what)


class FatesForModel(Protocol):
    """Knows what becomes of the modules of a model, as a plan does."""

    def fates(self, model: nn.Module) -> Mapping[str, What]:
        """By module path."""


def apply(model: nn.Module, what: What | Mapping[str, What] | FatesForModel) -> Applied:
    """Give the activations of a model's modules their fates, in place. `remove` undoes it.

    No module is replaced and no name, key, class or signature changes. Applying again replaces what
    was applied before. Returns what is applied, which prints as a tree.

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
    if hasattr(what, "fates"):
        what = what.fates(model)
    wanted = _wanted(model, what)
    _refuse_what_is_checkpointed(model, wanted)
    ways = _ways(wanted)
    remove(model)
    for module, way in ways:
        put(module, way)
    return Applied(
        type(model).__name__,
        tuple(Entry(path, type(m).__name__, what) for path, (m, what) in wanted.items()),
    )


def remove(model: nn.Module) -> None:
    """Undo `apply`: every module of the model is as before."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"remove() takes a model, but got {type(model).__name__}")
    for module in model.modules():
        take_away(module)


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
        if not any(patterns.matches(path, pattern) for path in modules):
            raise patterns.no_match(pattern, modules)
    ordered = sorted(what, key=patterns.specificity, reverse=True)
    found: _Wanted = {}
    by_module: dict[int, tuple[str, What]] = {}
    for path, module in modules.items():
        pattern = next((p for p in ordered if patterns.matches(path, p)), None)
        if pattern is None:
            continue
        first = by_module.setdefault(id(module), (path, what[pattern]))
        if first[1] != what[pattern]:
            raise ValueError(
                f"{first[0]} and {path} are one module, but it is given two fates: "
                f"{_told(first[1])} and {_told(what[pattern])}"
            )
        if first[0] == path:
            found[path] = module, what[pattern]
    return found


def _checked(what: Any) -> What:
    if isinstance(what, str):
        fate_named(what)
    elif not isinstance(what, Policy | Offload):
        raise TypeError(
            "A module is given a fate (keep, recompute, offload, spill), a policy or "
            f"rekindle.offload(...), but got {type(what).__name__}"
        )
    checked: What = what
    return checked


def _refuse_what_is_checkpointed(model: nn.Module, wanted: _Wanted) -> None:
    """Say that a module is checkpointed already, rather than do it twice."""
    for path, (named, _) in wanted.items():
        for module in named.modules():
            if isinstance(module, ActivationWrapper):
                raise ValueError(
                    f"{path or type(model).__name__} is, or contains, a module in a "
                    f"{type(module).__name__}: unwrap it, or leave it out"
                )
            if getattr(module, "gradient_checkpointing", False) is True and module.training:
                raise ValueError(
                    f"{path or type(model).__name__} has its own checkpointing turned on "
                    f"({type(module).__name__}.gradient_checkpointing): call "
                    "gradient_checkpointing_disable() first"
                )


_OFFLOADS = {
    "offload": offload(quota=1.0),
    "spill": offload(tier="disk", quota=1.0),
}


def _ways(wanted: _Wanted) -> list[tuple[nn.Module, Way]]:
    """How each module runs: Note [A fate inside another]."""
    ways: list[tuple[nn.Module, Way]] = []
    inside: dict[str, list[tuple[str, What]]] = {}
    for path, (_, what) in wanted.items():
        around = _around(path, wanted)
        if around is not None and what != "recompute":
            inside.setdefault(around, []).append((path, what))
    for path, (module, what) in wanted.items():
        parts = inside.get(path, [])
        if any(path == inner for inners in inside.values() for inner, _ in inners):
            continue  # it is a part of a policy
        if isinstance(what, Policy) or parts:
            ways.append((module, _joined(what, parts)))
        elif what == "recompute":
            ways.append((module, None))
        elif isinstance(what, Offload):
            ways.append((module, what))
        elif what != "keep":
            ways.append((module, _OFFLOADS[what]))
    return ways


def _around(path: str, wanted: _Wanted) -> str | None:
    """The nearest module around that is recorded or recomputed, unless one in between is not.

    Note [A fate inside another]. Inside a module that is recomputed, or has a policy, other fates
    are a matter of that module's policy: it drops what they would keep. Inside one that is
    offloaded, or kept, a region is a region: what it holds is offloaded, or kept.
    """
    while path:
        path = path.rpartition(".")[0]
        if path in wanted:
            what = wanted[path][1]
            if isinstance(what, Policy) or what == "recompute":
                return path
            return _around(path, wanted)
    return None


def _joined(what: What, parts: list[tuple[str, What]]) -> Policy:
    """One policy for a module and the parts of it that have fates of their own."""
    joined: Policy | None = None
    for path, part in sorted(parts, key=lambda part: -part[0].count(".")):
        policy = at(path, part if isinstance(part, Policy) else _as_fate(part))
        joined = policy if joined is None else joined | policy
    own = what if isinstance(what, Policy) else policies.recompute()
    return own if joined is None else joined | own


def _as_fate(what: Any) -> str:
    if isinstance(what, Offload):
        return Fate.SPILL.value if what.options.tier == "disk" else Fate.OFFLOAD.value
    return fate_named(what).value
