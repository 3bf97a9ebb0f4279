"""Values as JSON files, with no code in them: what is in a file is told by its schema."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from rekindle.planner import json_schema

_VERSION = 5
_OLDEST = 4
_Value = TypeVar("_Value")


def save(value: Any, what: str, path: str | os.PathLike[str]) -> None:
    """Write a dataclass; `what` it is makes the schema."""
    values = {"schema": f"rekindle {what}", "version": _VERSION, **asdict(value)}
    Path(path).write_text(json.dumps(values, indent=1), encoding="utf-8")


def load(kind: type[_Value], what: str, path: str | os.PathLike[str]) -> _Value:
    """Read what `save` wrote, this version or an older one; a file that is damaged is refused.

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
    """What a file of JSON says."""
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text, parse_constant=json_schema.refuse_constant)
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{name} is not JSON that rekindle reads: it is nested too deep") from None


def _from_4(values: dict[str, Any]) -> dict[str, Any]:
    """Version 5 has more fields, each with a default, and is read strictly."""
    return values


_MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {4: _from_4}
"""By version: what makes the fields of the next version of those in a file."""
