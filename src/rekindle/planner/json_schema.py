"""Checks parsed JSON against the annotated fields of a dataclass, and builds the value.

The annotations are the schema: a field that is added to a dataclass is checked without a change
here. Understood are `int`, `float`, `str`, `bool`, `None`, `Literal`, unions, tuples, other
dataclasses, and strategies (`strategy_json`). Whole numbers count things or bytes, so they
are not negative unless a field says `Difference`; neither are other numbers, which are finite too.
A class checks what has to hold between its fields in a method `inconsistencies`.
"""

import dataclasses
import types
from collections.abc import Callable, Iterator
from functools import cache
from reprlib import Repr
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as hints_of

from rekindle.strategy import Strategy
from rekindle.strategy_json import from_json, to_json

_Value = TypeVar("_Value")
_LARGEST = 2**63 - 1
_LARGEST_FLOAT = 1e18
"""Seconds and bytes a second beyond this are damage, and sums of them would not be finite."""
_MAY_BE_NEGATIVE = "may be negative"

Difference: TypeAlias = Annotated[int, _MAY_BE_NEGATIVE]
"""Bytes above what there was before, which may be fewer."""
Inconsistency: TypeAlias = tuple[str, str]
"""A place in a value, such as `order[2]`, and what is wrong there."""

_short = Repr()
_short.maxstring = _short.maxother = 60


NOT_SAVED = {"saved": False}
"""The metadata of a dataclass's field that files do not have."""


def _saved_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.metadata.get("saved", True)]


class SchemaError(ValueError):
    """Parsed JSON that does not fit; says where, what was expected and what was found."""

    def __init__(self, place: str, expected: str, found: str) -> None:
        super().__init__(f"{place} should be {expected}, but is {found}")


def encode(value: Any) -> Any:
    """The JSON of a value: dataclasses as objects, tuples as lists."""
    if isinstance(value, tuple):
        return [encode(each) for each in value]
    if not dataclasses.is_dataclass(value):
        return value
    if isinstance(value, Strategy):
        return to_json(value)
    return {field.name: encode(getattr(value, field.name)) for field in _saved_fields(value)}


def build(
    kind: Callable[..., _Value], values: Any, place: str = "", fills_in: bool = False
) -> _Value:
    """Build a dataclass from parsed JSON; raise `SchemaError` if it does not fit.

    Args:
        kind: the dataclass.
        values: what `json.loads` returned.
        place: where `values` are, for errors.
        fills_in: whether fields that have a default may be missing.
    """
    if not isinstance(values, dict):
        raise SchemaError(place or "the whole", "an object with fields", _short.repr(values))
    fields = _fields(kind)
    for name in values:
        if name not in fields:
            raise SchemaError(_at(place, str(name)), "no field", "there")
    built = {}
    for name, (hint, has_default) in fields.items():
        if name in values:
            built[name] = _value(hint, values[name], _at(place, name), fills_in)
        elif not (fills_in and has_default):
            raise SchemaError(_at(place, name), "a field", "missing")
    value = kind(**built)
    for where, what in getattr(value, "inconsistencies", _none)():
        raise ValueError(f"{_at(place, where)}: {what}")
    return value


def _none() -> Iterator[Inconsistency]:
    yield from ()


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """By name: a field's annotation, and whether it has a default."""
    hints = hints_of(kind, include_extras=True)
    return {
        field.name: (
            hints[field.name],
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING,
        )
        for field in _saved_fields(kind)
    }


def _value(hint: Any, found: Any, place: str, fills_in: bool) -> Any:
    """A value of an annotated type."""
    origin = get_origin(hint)
    if hint is Strategy:
        return from_json(found, place)
    if dataclasses.is_dataclass(hint):
        return build(hint, found, place, fills_in)  # type: ignore[arg-type]
    if origin is tuple:
        return _tuple(get_args(hint), found, place, fills_in)
    if origin in (Union, types.UnionType):
        return _one_of(get_args(hint), found, place, fills_in)
    if origin is Literal:
        if found not in get_args(hint) or isinstance(found, bool):
            words = ", ".join(map(str, get_args(hint)))
            raise SchemaError(place, f"one of {words}", _short.repr(found))
        return found
    return _plain(hint, found, place)


def _tuple(hints: tuple[Any, ...], found: Any, place: str, fills_in: bool) -> tuple[Any, ...]:
    is_uniform = len(hints) == 2 and hints[1] is Ellipsis
    if not isinstance(found, list):
        raise SchemaError(place, "a list", _short.repr(found))
    if not is_uniform and len(found) != len(hints):
        raise SchemaError(place, f"a list of {len(hints)}", f"one of {len(found)}")
    kinds = hints[:1] * len(found) if is_uniform else hints
    return tuple(
        _value(hint, each, f"{place}[{i}]", fills_in)
        for i, (hint, each) in enumerate(zip(kinds, found, strict=True))
    )


def _one_of(hints: tuple[Any, ...], found: Any, place: str, fills_in: bool) -> Any:
    """The first of several types that fits; the error of the last, which is not None."""
    if found is None and types.NoneType in hints:
        return None
    *others, last = [hint for hint in hints if hint is not types.NoneType]
    for hint in others:
        try:
            return _value(hint, found, place, fills_in)
        except ValueError:
            continue
    return _value(last, found, place, fills_in)


def _plain(hint: Any, found: Any, place: str) -> Any:
    if hint is float:
        if type(found) not in (int, float) or not 0 <= found <= _LARGEST_FLOAT:
            raise SchemaError(place, "a number from 0 to 1e18", _short.repr(found))
    elif hint is int or hint == Difference:
        least = 0 if hint is int else -_LARGEST
        if type(found) is not int or not least <= found <= _LARGEST:
            words = "from 0 on" if hint is int else "of at most 63 bits"
            raise SchemaError(place, f"a whole number {words}", _short.repr(found))
    elif hint in (str, bool):
        if type(found) is not hint:
            word = "text" if hint is str else "true or false"
            raise SchemaError(place, word, _short.repr(found))
    else:
        raise TypeError(f"{place} has a type that the schema does not know: {hint}")
    return found


def refuse_constant(constant: str) -> float:
    """For `json.loads(parse_constant=...)`: refuses NaN and infinities, which are not JSON."""
    raise ValueError(f"{constant} is not a number in JSON")
