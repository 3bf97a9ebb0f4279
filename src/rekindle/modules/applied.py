"""`Applied`: which modules of a model run by which strategies, as a value that prints as a tree."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rekindle.modules import patterns
from rekindle.strategy import Strategy


@dataclass(frozen=True)
class Entry:
    """One module and the strategy for its activations."""

    path: str
    kind: str
    """The name of the module's class."""
    strategy: Strategy
    words: str = field(default="", compare=False)
    """The words of the plan that it was applied by; empty without a plan."""


@dataclass(frozen=True)
class Applied:
    """The strategies that were applied to a model; prints as a tree."""

    model: str
    """The name of the model's class."""
    entries: tuple[Entry, ...]

    def in_words(self, words: Mapping[str, str]) -> "Applied":
        """The value with a plan's words for what is done, by path."""
        entries = (replace(each, words=words.get(each.path, "")) for each in self.entries)
        return replace(self, entries=tuple(entries))

    def __str__(self) -> str:
        return format_applied(self)

    __repr__ = __str__


def format_applied(applied: Applied) -> str:
    """The modules that have strategies, as a tree; modules that are alike share a line."""
    return "\n".join([applied.model, *_lines(None, applied.entries, 1)])


def _lines(parents: list[Entry] | None, entries: tuple[Entry, ...], depth: int) -> list[str]:
    """The lines of the entries right below some modules; None for the outermost entries."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        parent = _parent(entry, entries)
        if (parent is None) if parents is None else (parent in parents):
            key = patterns.generalized(entry.path), entry.kind, entry.strategy
            groups.setdefault(key, []).append(entry)
    lines = []
    for members in groups.values():
        first = members[0]
        path = patterns.spanned([entry.path for entry in members])
        count = f"{len(members)} x " if len(members) > 1 else ""
        what = first.words or first.strategy
        lines.append(f"{'  ' * depth}{path or '(itself)'}: {count}{first.kind}: {what}")
        lines += _lines(members, entries, depth + 1)
    return lines


def _parent(entry: Entry, entries: tuple[Entry, ...]) -> Entry | None:
    """The nearest of the entries around one."""
    around = [
        other
        for other in entries
        if other is not entry and patterns.is_inside(entry.path, other.path)
    ]
    return max(around, key=lambda other: len(other.path), default=None)
