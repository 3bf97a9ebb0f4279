"""The largest saved tensors of a recorded step, one line for those that are alike."""

from collections.abc import Iterable

from rekindle.explanation.record import StepRecord, Storage
from rekindle.explanation.summarize import format_line
from rekindle.explanation.types import SavedActivation
from rekindle.modules.patterns import generalized
from rekindle.planner.op_words import word_of

_LARGEST = 50
"""Lines that are listed."""


def saved_activations(
    record: StepRecord, at_peak: Iterable[Storage]
) -> tuple[SavedActivation, ...]:
    """Return the largest storages that autograd saved in the forward.

    Those of layers that are alike, made by the same op and line, are one.
    """
    alive = set(map(id, at_peak))
    groups: dict[object, list[Storage]] = {}
    for storage in record.storages():
        if storage.saves and storage.site.phase == "forward":
            site = storage.site
            key = storage.shape, storage.dtype, site.op, generalized(site.module), site.line
            groups.setdefault(key, []).append(storage)
    largest = sorted(groups.values(), key=_bytes, reverse=True)[:_LARGEST]
    return tuple(_saved(group, alive) for group in largest)


def _saved(group: list[Storage], alive: set[int]) -> SavedActivation:
    first = group[0]
    line, source = format_line(first.site.line)
    readers = [save.reader for each in group for save in each.saves if save.reader is not None]
    if len(group) > 1:
        readers = [(node, generalized(module)) for node, module in readers]
    needed_by = (f"{node} in {module}" if module else node for node, module in readers)
    return SavedActivation(
        shape=first.shape,
        dtype=first.dtype,
        op=word_of(first.site.op),
        modules=tuple(each.site.module for each in group),
        line=line,
        source=source,
        nbytes=_bytes(group),
        at_peak=_bytes(each for each in group if id(each) in alive),
        needed_by=tuple(dict.fromkeys(needed_by)),
    )


def _bytes(storages: Iterable[Storage]) -> int:
    return sum(each.nbytes for each in storages)
