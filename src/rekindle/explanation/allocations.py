"""The storages of a recorded step, one by one: what snapshots are made of."""

from collections.abc import Callable
from functools import cache

from rekindle.explanation.record import Event, StepRecord
from rekindle.explanation.sites import Line
from rekindle.explanation.summarize import format_line, kind_of_storage
from rekindle.explanation.types import Allocation
from rekindle.planner.op_words import word_of


def allocations(record: StepRecord) -> tuple[Allocation, ...]:
    """Return the storages of a step, in the order in which they were made."""
    text_of = cache(lambda line: format_line(line)[0])
    return tuple(_allocation(each, record, text_of) for each in record.events if not each.is_freed)


def _allocation(
    event: Event, record: StepRecord, text_of: Callable[[Line | None], str]
) -> Allocation:
    storage, line = event.storage, event.site.line
    return Allocation(
        nbytes=storage.nbytes,
        kind=kind_of_storage(storage, record),
        op=word_of(event.site.op),
        phase=event.site.phase,
        module=event.site.module,
        line=text_of(line),
        function="" if line is None else line.code.co_qualname,
        made=storage.born,
        freed=storage.freed,
    )
