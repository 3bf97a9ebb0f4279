"""Values as JSON files, with no code in them: what is in a file is told by its schema."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

_VERSION = 4
_Value = TypeVar("_Value")


def save(value: Any, what: str, path: str | os.PathLike[str]) -> None:
    """Write a dataclass; `what` it is makes the schema."""
    values = {"schema": f"rekindle {what}", "version": _VERSION, **asdict(value)}
    Path(path).write_text(json.dumps(values, indent=1))


def load(
    build: Callable[[dict[str, Any]], _Value], what: str, path: str | os.PathLike[str]
) -> _Value:
    """Read what `save` wrote; `build` makes the value of its fields."""
    name = os.fspath(path)
    try:
        values = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not isinstance(values, dict) or values.pop("schema", None) != f"rekindle {what}":
        raise ValueError(f"{name} is not a {what} of rekindle's")
    version = values.pop("version", None)
    if version != _VERSION:
        raise ValueError(f"{name} has version {version}, but this rekindle reads {_VERSION}")
    try:
        return build(values)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name} is not a whole {what}: {error}") from None
