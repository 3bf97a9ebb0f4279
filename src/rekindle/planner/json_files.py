"""The values of the planner as JSON files: schema, version, no code; older versions are read."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rekindle.planner import json_schema

_VERSION = 11
_OLDEST = 4
_Value = TypeVar("_Value")


def save(value: Any, what: str, path: str | os.PathLike[str]) -> None:
    """Write a dataclass; the name `what` of its kind makes the schema."""
    Path(path).write_text(json.dumps(as_json(value, what), indent=1), encoding="utf-8")


def as_json(value: Any, what: str) -> dict[str, Any]:
    """The plain values of the file that `save` writes."""
    return {"schema": f"rekindle {what}", "version": _VERSION, **json_schema.encode(value)}


def load(kind: type[_Value], what: str, path: str | os.PathLike[str]) -> _Value:
    """Read a file that `save` wrote, of this version or an older one; refuse a damaged one.

    The error names the file, the place in it, what is expected there and what was found.
    """
    name = os.fspath(path)
    values = _parsed(path)
    if not isinstance(values, dict) or values.pop("schema", None) != f"rekindle {what}":
        raise ValueError(f"{name} is not a {what} of rekindle's")
    version = values.pop("version", None)
    if type(version) is not int or not _OLDEST <= version <= _VERSION:
        raise ValueError(
            f"{name} has version {version}, but this rekindle reads {_OLDEST} to {_VERSION}"
        )
    try:
        for older in range(version, _VERSION):
            values = _MIGRATIONS[older](values)
        return json_schema.build(kind, values, fills_in=version < _VERSION)
    except ValueError as error:
        raise ValueError(f"{name} is not a whole {what}: {error}") from None


def _parsed(path: str | os.PathLike[str]) -> Any:
    """The parsed JSON of a file."""
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text, parse_constant=json_schema.refuse_constant)
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{name} is not JSON that rekindle reads: it is nested too deep") from None


Fields = dict[str, Any]
"""An object of JSON."""


def _with_more_fields(values: Fields) -> Fields:
    """The next version has more fields, each with a default, and is read strictly."""
    return values


def _from_5(values: Fields) -> Fields:
    """In version 6, a candidate has a strategy in place of a fate and numbers of results."""
    if "order" not in values:  # a plan
        return {**values, "blocks": _each(values.get("blocks"), _planned_block)}
    return {**values, "blocks": _each(values["blocks"], _block_profile)}


def _block_profile(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    renamed = {_RENAMED_IN_6.get(name, name): value for name, value in values.items()}
    if "candidates" in renamed:
        renamed["candidates"] = _each(renamed["candidates"], _candidate)
    return renamed


def _planned_block(values: Any) -> Any:
    is_whole = isinstance(values, list) and len(values) == 3
    return [*values[:2], _candidate(values[2])] if is_whole else values


def _candidate(values: Any) -> Any:
    """A candidate of what was an option; whatever does not fit is left for the schema to refuse."""
    if not isinstance(values, dict):
        return values
    old = {name: values.get(name, default) for name, default in _OLD_STRATEGY.items()}
    renamed = {
        _RENAMED_IN_6.get(name, name): value
        for name, value in values.items()
        if name not in _OLD_STRATEGY
    }
    return {"strategy": _strategy(**old), **renamed}


_RENAMED_IN_6 = {
    "options": "candidates",
    "output_let_go": "output_freed",
    "input_let_go": "input_freed",
    "forward_host": "forward_host_seconds",
    "backward_host": "backward_host_seconds",
    "derived_names": "recomputed_names",
}
_OLD_STRATEGY: Fields = {
    "fate": None,
    "kept": [],
    "offloaded": [],
    "derived": [],
    "tier": "host",
    "saves": 0,
    "kept_ops": [],
    "offloaded_ops": [],
}
"""Fields of an option that say what is done with activations, with their defaults."""


def _strategy(
    *,
    fate: Any,
    kept: Any,
    offloaded: Any,
    derived: Any,
    tier: Any,
    saves: Any,
    kept_ops: Any,
    offloaded_ops: Any,
) -> Any:
    """The JSON of the strategy that an option stood for."""
    if fate == "select":
        by_address = bool(kept_ops or offloaded_ops)
        policy = {
            "policy": "planned_ops" if by_address else "numbered_ops",
            "kept": kept_ops if by_address else kept,
            "offloaded": offloaded_ops if by_address else offloaded,
            "tier": tier,
        }
        return {"strategy": "selective", "policy": policy}
    if fate == "derive":
        moved = {"offloaded": offloaded, "tier": tier}
        return {"strategy": "saved_indices", "recomputed": derived, **moved, "count": saves}
    return {"strategy": fate}


def _each(found: Any, change: Callable[[Any], Any]) -> Any:
    return [change(each) for each in found] if isinstance(found, list) else found


_MIGRATIONS: dict[int, Callable[[Fields], Fields]] = {
    4: _with_more_fields,
    5: _from_5,
    6: _with_more_fields,
    7: _with_more_fields,
    8: _with_more_fields,
    9: _with_more_fields,
    10: _with_more_fields,
}
"""By version: the function that makes the fields of the next version."""
