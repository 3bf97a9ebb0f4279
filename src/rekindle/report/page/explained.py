"""The part of a page's document that has an explanation."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from rekindle.explanation.types import Change, Explanation, MemoryPoint, SavedActivation, Share
from rekindle.report.explanation_text import grouped_modules
from rekindle.report.page.shared import Table, rounded

Json: TypeAlias = dict[str, Any]


def explanation_document(found: Explanation) -> Json:
    """Return an explanation as plain values; names are indices into `names`."""
    names: Table[str] = Table()
    values = {
        "source": found.source,
        "peak": found.peak,
        "peak_at": found.peak_at,
        "static": found.static_bytes,
        "fits": found.fits,
        "seconds": found.seconds,
        "kinds": list(found.kind_names),
        "shares": {
            "kind": _shares(found.kinds, names),
            "group": _shares(grouped_modules(found), names),
            "module": _shares((each for each in found.modules if each.highest), names),
            "op": _shares(found.ops, names),
            "line": _shares(found.lines, names),
        },
        "timeline": [_point(each, names) for each in found.timeline],
        "saved": [_saved(each, names) for each in found.saved],
        "changes": [_change(each) for each in found.changes],
        "others": [_change(each) for each in found.others],
        "unhelpful": [_change(each) for each in found.unhelpful],
    }
    return {**values, "names": names.values()}


def _sparse(kinds: Iterable[int]) -> list[list[int]]:
    """Bytes by kind, without those of which there are none: pairs of the kind and the bytes."""
    return [[kind, nbytes] for kind, nbytes in enumerate(kinds) if nbytes]


def _shares(shares: Iterable[Share], names: Table[str]) -> list[list[Any]]:
    return [
        [names.index(s.name), names.index(s.about), s.at_peak, s.highest, _sparse(s.kinds)]
        for s in shares
    ]


def _point(point: MemoryPoint, names: Table[str]) -> list[Any]:
    seconds = None if point.seconds is None else rounded(point.seconds)
    where = names.indices((point.phase, point.module, point.op))
    return [point.event, seconds, *where, _sparse(point.kinds)]


def _saved(saved: SavedActivation, names: Table[str]) -> Json:
    return {
        "shape": list(saved.shape),
        "dtype": saved.dtype,
        "op": saved.op,
        "modules": names.indices(saved.modules),
        "line": saved.line,
        "source": saved.source,
        "bytes": saved.nbytes,
        "at_peak": saved.at_peak,
        "needed_by": names.indices(saved.needed_by),
    }


def _change(change: Change) -> Json:
    return {
        "name": change.name,
        "how": change.how,
        "peak": change.peak,
        "saved": change.saved,
        "seconds": change.seconds,
        "note": change.note,
        "fits": change.fits,
    }
