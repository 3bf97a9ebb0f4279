"""Pages of values, for browsers; `report.page` writes them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any

OtherSteps = Mapping[str, tuple[int, float]]
"""Steps that were measured elsewhere, by their names: the peak in bytes, and seconds."""


@dataclass(frozen=True)
class PageRequest:
    """A user's call of `report`."""

    path: str | os.PathLike[str]
    """The file of the page."""
    snapshot: str | os.PathLike[str] | None = None
    """The file of a snapshot for torch's memory-snapshot page; None for none."""
    points: int = 12
    """Plans to look for, from the plain peak down to the smallest that works."""
    others: OtherSteps | None = None
    profile: Any = None
    """The profile of a plan that was loaded without one."""
    explanation: Any = None

    def __post_init__(self) -> None:
        """Refuse what would fail after plans were solved for."""
        for path in (self.path, self.snapshot):
            folder = Path("." if path is None else path).parent
            if not folder.is_dir():
                raise FileNotFoundError(f"There is no folder {folder} to write {path} to")
        if not isinstance(self.points, int) or isinstance(self.points, bool) or self.points < 1:
            raise ValueError(f"points should be a whole number from 1 on, but got {self.points!r}")


@singledispatch
def as_page(value: object, request: PageRequest) -> Path:
    """Write the page that a report has registered for values of a class; return its path."""
    kind = type(value).__name__
    raise TypeError(f"There is no page of a {kind} that could be written to {request.path}")
