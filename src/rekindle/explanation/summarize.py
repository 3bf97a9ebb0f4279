"""Sums up a recorded step: its peak, and bytes by kind, module, op and line, over its timeline."""

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from rekindle.explanation.record import Event, StepRecord, Storage
from rekindle.explanation.sites import Line, OpSite
from rekindle.explanation.static_shares import Held
from rekindle.explanation.types import KINDS, MemoryPoint, Share
from rekindle.modules.patterns import outer_paths
from rekindle.planner.op_words import word_of
from rekindle.regions.errors.call_sites import look_up

_POINTS = 256
"""Moments of a timeline, at most about."""
_SHARES = 100
"""Ops, and lines, that are listed; those with fewest bytes are left out."""


@dataclass(frozen=True)
class Walk:
    """Bytes at each event of a step, without those that are there all the time."""

    totals: list[int]
    """After each event."""
    peak_event: int
    """The number of the event after which most bytes are alive; -1 if nothing was made."""
    at_peak: list[Storage]

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once."""
        return self.totals[self.peak_event] if self.peak_event >= 0 else 0


def walk(record: StepRecord) -> Walk:
    """Return the bytes after each event, and what is alive when they are most."""
    totals = _running(record.events, lambda storage: storage.nbytes)
    peak_event = max(range(len(totals)), key=totals.__getitem__, default=-1)
    alive = [s for s in record.storages() if _is_alive(s, peak_event)]
    return Walk(totals, peak_event, alive)


def highest(record: StepRecord, nbytes: Callable[[Storage], int]) -> tuple[int, int]:
    """Return the event of the most bytes at once, and the bytes.

    Each storage has the bytes that a function says.
    """
    totals = _running(record.events, nbytes)
    event = max(range(len(totals)), key=totals.__getitem__, default=-1)
    return event, totals[event] if totals else 0


def _running(events: list[Event], nbytes: Callable[[Storage], int]) -> list[int]:
    total, totals = 0, []
    for event in events:
        total += -nbytes(event.storage) if event.is_freed else nbytes(event.storage)
        totals.append(total)
    return totals


def _is_alive(storage: Storage, event: int) -> bool:
    return storage.born <= event and (storage.freed is None or event < storage.freed)


def kind_of_storage(storage: Storage, record: StepRecord) -> str:
    """Return the kind of memory that a storage is, as `KINDS` describes them."""
    if storage.classes:
        return "logits"
    if storage.site.phase == "replay":
        return "replay"
    if storage.site.phase == "backward":
        return "workspace"
    at = record.backward_at
    outlives_forward = at is not None and (storage.freed is None or storage.freed >= at)
    return "activations" if storage.saves or outlives_forward else "workspace"


def format_moment(record: StepRecord, event: int, model: str) -> str:
    """Return the phase, module, op and line of the op that ran at an event."""
    if event < 0:
        return "no op"
    site = record.events[event].site
    line = format_line(site.line)[0]
    at = f" at {line}" if line else ""
    return f"the {site.phase} of {site.module or model}: {word_of(site.op)}{at}"


@dataclass
class _Sum:
    """A running sum of bytes, its highest point, and the bytes by kind at the peak."""

    now: int = 0
    highest: int = 0
    kinds: list[int] = field(default_factory=lambda: [0] * len(KINDS))

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        self.highest = max(self.highest, self.now)


@dataclass(frozen=True)
class Shares:
    """Bytes by kind, by module, by op and by line."""

    kinds: tuple[Share, ...]
    modules: tuple[Share, ...]
    ops: tuple[Share, ...]
    lines: tuple[Share, ...]


def shares(
    record: StepRecord, found: Walk, static: Mapping[Held, int], classes: Mapping[str, str]
) -> Shares:
    """Sum up bytes by kind, module, op and line. `classes` has the model's modules by path."""
    kinds: dict[str, _Sum] = {kind: _Sum() for kind in KINDS}
    modules: dict[str, _Sum] = {path: _Sum() for path in classes}
    ops: dict[str, _Sum] = defaultdict(_Sum)
    lines: dict[tuple[str, str], _Sum] = defaultdict(_Sum)
    text_of = cache(format_line)
    around = cache(lambda path: [p for p in (*outer_paths(path), path) if p in modules])

    def sums_of(storage: Storage) -> Iterable[_Sum]:
        yield kinds[kind_of_storage(storage, record)]
        yield from (modules[path] for path in around(storage.site.module))
        yield ops[name_of_op(storage.site)]
        if storage.site.line is not None:
            yield lines[text_of(storage.site.line)]

    for held, nbytes in static.items():
        k = KINDS.index(held.kind)
        for each in (kinds[held.kind], *(modules[path] for path in around(held.module))):
            each.add(nbytes)
            each.kinds[k] += nbytes
    for event in record.events:
        nbytes = event.storage.nbytes
        for each in sums_of(event.storage):
            each.add(-nbytes if event.is_freed else nbytes)
    for storage in found.at_peak:
        k = KINDS.index(kind_of_storage(storage, record))
        for each in sums_of(storage):
            each.kinds[k] += storage.nbytes
    return Shares(
        tuple(_share(kind, "", each) for kind, each in kinds.items()),
        tuple(_share(path, classes[path], each) for path, each in modules.items()),
        _largest(_share(op, "", each) for op, each in ops.items()),
        _largest(_share(*text, each) for text, each in lines.items()),
    )


def _share(name: str, about: str, found: _Sum) -> Share:
    return Share(name, about, sum(found.kinds), found.highest, tuple(found.kinds))


def _largest(found: Iterable[Share]) -> tuple[Share, ...]:
    """The shares with most bytes at the peak; of those with as many, with most at any moment."""
    order = sorted(found, key=lambda each: (-each.at_peak, -each.highest, each.name))
    return tuple(order[:_SHARES])


def name_of_op(site: OpSite) -> str:
    """Return the word for an op, with the part of the step if that is not the forward."""
    word = word_of(site.op) or "before the first op"
    return word if site.phase == "forward" else f"{word} in {site.phase}"


def format_line(line: Line | None) -> tuple[str, str]:
    """Return the file and line, and the source text; empty if there is no line."""
    if line is None:
        return "", ""
    site = look_up((line.code, line.at))
    return f"{_short(site.file)}:{site.line}", site.source


def _short(file: str) -> str:
    """The path of a file from the folder that it is imported from, if that is on Python's path."""
    folders = [folder for folder in sys.path if folder and file.startswith(folder + os.sep)]
    return file.removeprefix(max(folders, key=len) + os.sep) if folders else file


def timeline(record: StepRecord, found: Walk, static: Mapping[str, int]) -> tuple[MemoryPoint, ...]:
    """Return moments of the step: of each stretch of events, the highest.

    `static` has the bytes by kind that are there all the time.
    """
    count = len(record.events)
    stretch = -(-count // _POINTS)
    chosen = {
        max(range(begin, min(begin + stretch, count)), key=found.totals.__getitem__)
        for begin in range(0, count, max(stretch, 1))
    }
    chosen |= {found.peak_event, count - 1} if count else set()
    points, now = [], Counter(static)
    for i, event in enumerate(record.events):
        nbytes = event.storage.nbytes
        now[kind_of_storage(event.storage, record)] += -nbytes if event.is_freed else nbytes
        if i in chosen:
            kinds = tuple(now[kind] for kind in KINDS)
            site = event.site
            where = (site.phase, site.module, word_of(site.op))
            points.append(MemoryPoint(i + 1, event.seconds, *where, sum(kinds), kinds))
    return tuple(points)
