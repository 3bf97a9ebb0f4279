"""Strategies as JSON: `to_json` and `from_json`.

A value is an object with a tag (`"strategy"` or `"policy"`) and the fields of its class by name.
What is read is checked field by field; an error names the place, what is expected there and what
was found. This module imports no torch.
"""

from collections.abc import Callable
from dataclasses import MISSING, fields
from reprlib import Repr
from typing import Any, TypeAlias, get_args

from rekindle.strategy import (
    Compiled,
    Keep,
    NumberedOps,
    Offload,
    OnFull,
    OpAddress,
    PlannedOps,
    Recompute,
    RecomputeInTiles,
    Rows,
    SavedIndices,
    Selective,
    Strategy,
    TierName,
    Tile,
)


def to_json(strategy: Strategy) -> dict[str, Any]:
    """A strategy as a dict of JSON values, which `from_json` reads.

    >>> to_json(SavedIndices(recomputed=(2,), count=5))
    {'strategy': 'saved_indices', 'recomputed': [2], 'offloaded': [], 'tier': 'host', 'count': 5,
     'modules': []}

    Raises a `ValueError` for a policy that is made of a Python function or class.
    """
    tag = _TAGS.get(type(strategy))
    if tag is None:
        raise TypeError(f"to_json() takes a strategy, but got {type(strategy).__name__}")
    return {"strategy": tag, **_fields_to_json(strategy)}


def from_json(values: Any, place: str = "strategy") -> Strategy:
    """The strategy that `to_json` wrote; fields that have a default may be missing.

    Raises a `ValueError` that names the place of what is wrong. `place` is where `values` are.

    >>> from_json({"strategy": "tile", "chunks": 4, "inner": {"strategy": "keep"}})
    Tile(chunks=4, inner=Keep())
    """
    found: Strategy = _read_tagged(values, place, "strategy", _STRATEGIES)
    return found


PolicyWriter: TypeAlias = Callable[[Any], dict[str, Any]]
"""Makes a dict with a tag `"policy"` of a policy, or raises a `ValueError`."""
PolicyReader: TypeAlias = Callable[[dict[str, Any], str], Any]
"""Makes a policy of such a dict; the second argument is its place, for errors."""

_policy_formats: list[tuple[PolicyWriter, PolicyReader]] = []


def register_policies(write: PolicyWriter, read: PolicyReader) -> None:
    """Have policies saved that are no plain data: `rekindle.policies`, which know torch's ops."""
    _policy_formats[:] = [(write, read)]


def _fields_to_json(value: Any) -> dict[str, Any]:
    return {field.name: _value_to_json(getattr(value, field.name)) for field in fields(value)}


def _value_to_json(value: Any) -> Any:
    if isinstance(value, Strategy):
        return to_json(value)
    if isinstance(value, PlannedOps | NumberedOps):
        return {"policy": _TAGS[type(value)], **_fields_to_json(value)}
    if isinstance(value, OpAddress):
        return _fields_to_json(value)
    if isinstance(value, tuple):
        return [_value_to_json(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    for write, _ in _policy_formats:
        return write(value)
    raise ValueError(f"A policy of type {type(value).__name__} cannot be saved as JSON")


_Reader: TypeAlias = Callable[[Any, str], Any]
"""Makes a field's value of what JSON has at a place, or raises a `ValueError`."""
_short = Repr()
_short.maxstring = _short.maxother = 60
_LARGEST = 2**63 - 1


def wrong(place: str, expected: str, found: Any) -> ValueError:
    """The error for what JSON has at a place where something else is expected."""
    return ValueError(f"{place} should be {expected}, but is {_short.repr(found)}")


def _read_whole(found: Any, place: str) -> int:
    if type(found) is not int or not 0 <= found <= _LARGEST:
        raise wrong(place, "a whole number from 0 on", found)
    return found


def _read_positive(found: Any, place: str) -> int:
    if type(found) is not int or not 1 <= found <= _LARGEST:
        raise wrong(place, "a whole number from 1 on", found)
    return found


def _read_share_or_bytes(found: Any, place: str) -> int | float:
    if type(found) is float and 0 <= found <= 1:
        return found
    if type(found) is not int or not 0 <= found <= _LARGEST:
        raise wrong(place, "bytes as a whole number, or a share from 0.0 to 1.0", found)
    return found


def _read_share(found: Any, place: str) -> float:
    if type(found) not in (int, float) or not 0 <= found <= 1:
        raise wrong(place, "a share from 0.0 to 1.0", found)
    return float(found)


def _read_text(found: Any, place: str) -> str:
    if type(found) is not str:
        raise wrong(place, "text", found)
    return found


def _read_bool(found: Any, place: str) -> bool:
    if type(found) is not bool:
        raise wrong(place, "true or false", found)
    return found


def _one_of(words: tuple[str, ...]) -> _Reader:
    def read(found: Any, place: str) -> str:
        if type(found) is not str or found not in words:
            raise wrong(place, f"one of {', '.join(words)}", found)
        return found

    return read


def _or_none(read: _Reader) -> _Reader:
    return lambda found, place: None if found is None else read(found, place)


def _each(read: _Reader) -> _Reader:
    """Reads a list of distinct values into a tuple."""

    def read_all(found: Any, place: str) -> tuple[Any, ...]:
        if not isinstance(found, list):
            raise wrong(place, "a list", found)
        values = tuple(read(item, f"{place}[{i}]") for i, item in enumerate(found))
        for i, value in enumerate(values):
            if value in values[:i]:
                raise ValueError(f"{place}[{i}] is there a second time: {value}")
        return values

    return read_all


def _read_address(found: Any, place: str) -> OpAddress:
    address: OpAddress = _read_fields(OpAddress, found, place)
    if address.index >= address.count:
        raise ValueError(f"{place}.index is {address.index} of {address.count}")
    return address


def _read_policy(found: Any, place: str) -> Any:
    name = found.get("policy") if isinstance(found, dict) else None
    if isinstance(name, str) and name not in _POLICIES:
        for _, read in _policy_formats:
            return read(found, place)
    return _read_tagged(found, place, "policy", _POLICIES)


def _read_tagged(found: Any, place: str, tag: str, kinds: dict[str, type]) -> Any:
    if not isinstance(found, dict):
        raise wrong(place, f"an object with a field {tag!r}", found)
    name = found.get(tag)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise wrong(f"{place}.{tag}", f"one of {', '.join(kinds)}", name)
    value = _read_fields(kind, {key: found[key] for key in found if key != tag}, place)
    one, other = _DISJOINT.get(kind, (None, None))
    if one is not None and other is not None:
        shared = set(getattr(value, one)) & set(getattr(value, other))
        if shared:
            raise ValueError(f"{place}.{one} has {min(shared)}, which is in {other}, too")
    return value


def _read_fields(kind: type, found: Any, place: str) -> Any:
    if not isinstance(found, dict):
        raise wrong(place, "an object with fields", found)
    readers = _READERS[kind]
    for name in found:
        if name not in readers:
            raise ValueError(f"{place}.{name} should be no field, but is there")
    given = {name: readers[name](found[name], f"{place}.{name}") for name in found}
    for field in fields(kind):
        if field.name not in given and field.default is MISSING:
            raise ValueError(f"{place}.{field.name} should be a field, but is missing")
    return kind(**given)


_STRATEGIES: dict[str, type] = {
    "keep": Keep,
    "recompute": Recompute,
    "selective": Selective,
    "saved_indices": SavedIndices,
    "offload": Offload,
    "rows": Rows,
    "tile": Tile,
    "compiled": Compiled,
    "recompute_in_tiles": RecomputeInTiles,
}
_POLICIES: dict[str, type] = {"planned_ops": PlannedOps, "numbered_ops": NumberedOps}
_TAGS: dict[type, str] = {kind: tag for tag, kind in {**_STRATEGIES, **_POLICIES}.items()}

_read_tier = _one_of(get_args(TierName))
_read_indices = _each(_read_whole)
_read_addresses = _each(_read_address)
_READERS: dict[type, dict[str, _Reader]] = {
    Keep: {},
    Recompute: {},
    Selective: {"policy": _read_policy},
    SavedIndices: {
        "recomputed": _read_indices,
        "offloaded": _read_indices,
        "tier": _read_tier,
        "count": _read_whole,
        "modules": _each(_read_text),
    },
    Offload: {
        "tier": _read_tier,
        "quota": _or_none(_read_share_or_bytes),
        "min_bytes": _or_none(_read_whole),
        "max_host_bytes": _or_none(_read_whole),
        "directory": _or_none(_read_text),
        "on_full": _one_of(get_args(OnFull)),
        "derive": _read_bool,
    },
    Rows: {"exact": _read_bool},
    Tile: {"chunks": _read_positive, "inner": from_json},
    Compiled: {"budget": _read_share, "inner": from_json},
    RecomputeInTiles: {"modules": _each(_read_text), "chunks": _read_positive},
    PlannedOps: {
        "kept": _read_addresses,
        "offloaded": _read_addresses,
        "tier": _read_tier,
        "moves_input": _read_bool,
    },
    NumberedOps: {"kept": _read_indices, "offloaded": _read_indices, "tier": _read_tier},
    OpAddress: {
        "module": _read_text,
        "op": _read_text,
        "index": _read_whole,
        "count": _read_positive,
    },
}
_DISJOINT: dict[type, tuple[str, str]] = {
    SavedIndices: ("recomputed", "offloaded"),
    PlannedOps: ("kept", "offloaded"),
    NumberedOps: ("kept", "offloaded"),
}
"""Two fields that may not name the same tensor."""
