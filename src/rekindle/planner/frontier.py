"""A frontier: plans of one step, from the plain peak down to the smallest that works."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from rekindle.planner import json_files
from rekindle.planner.as_html import as_html
from rekindle.planner.as_page import OtherSteps, PageRequest, as_page
from rekindle.planner.as_plot import as_plot
from rekindle.planner.as_text import as_text
from rekindle.planner.json_schema import Inconsistency
from rekindle.planner.plan import Plan
from rekindle.planner.types import Profile, Scalar
from rekindle.sizes import format_bytes, format_count


@dataclass(frozen=True)
class Point:
    """One point of a frontier: the peak and the time of a step under a plan."""

    peak: int
    seconds: float
    plan: Plan

    def as_dict(self) -> dict[str, Scalar]:
        """The peak, the time, and the figures of the plan, for logs."""
        return {"peak": self.peak, "seconds": self.seconds, **self.plan.as_dict()}

    def __repr__(self) -> str:
        time = f"{self.seconds * 1e3:.1f} ms, {self.plan.slowdown:.2f}x the time"
        return f"<Point: {format_bytes(self.peak)}, {time}>"


@dataclass(frozen=True, eq=False)
class Frontier(Sequence[Point]):
    """Plans from the plain peak down to the smallest that works: time against memory.

    It is a sequence of its points, and equal to a list of them. It prints as a table.
    """

    points: tuple[Point, ...]

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> "Frontier": ...
    def __getitem__(self, index: int | slice) -> "Point | Frontier":
        return Frontier(self.points[index]) if isinstance(index, slice) else self.points[index]

    def __len__(self) -> int:
        return len(self.points)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Frontier | list | tuple):
            return NotImplemented
        return self.points == tuple(other)

    def __hash__(self) -> int:
        return hash(self.points)

    def inconsistencies(self) -> Iterator[Inconsistency]:
        """Places where fields of the right types contradict each other, with what is wrong."""
        for i, point in enumerate(self.points[1:], 1):
            if point.peak >= self.points[i - 1].peak:
                yield f"points[{i}].peak", "should be below that of the point before"

    def plot(self, axes: Any = None) -> Any:
        """Draw time against memory with matplotlib, and return the axes.

        Args:
            axes: the axes of matplotlib to draw on. None: those of a new figure, which notebooks
                show; `frontier.plot().figure.savefig("frontier.png")` writes it to a file.
        """
        return as_plot(self, axes)

    def as_dict(self) -> dict[str, list[Scalar | None]]:
        """A column for each figure, as a data frame takes them: `pandas.DataFrame(f.as_dict())`.

        Of a figure that is not known at a point there is None.
        """
        rows = [point.as_dict() for point in self.points]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def as_json(self) -> dict[str, Any]:
        """The frontier as plain values: all that its file has."""
        return json_files.as_json(self, "frontier")

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        others: OtherSteps | None = None,
        profile: Profile | None = None,
        explanation: Any = None,
    ) -> Path:
        """Write a page with a slider over the points of the frontier.

        It is one file that needs nothing from elsewhere. Returns its path.

        Args:
            path: the file to write, such as `"frontier.html"`.
            others: steps to draw beside the plans, by their names: the peak in bytes, and seconds.
            profile: the profile of a frontier that was loaded from a file: without it, the page has
                no memory over time.
            explanation: what `rekindle.explain` returned, to be shown on the same page.
        """
        request = PageRequest(
            path, others=others, profile=profile, explanation=explanation, points=len(self)
        )
        return as_page(self, request)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the frontier, with all its plans, as JSON."""
        json_files.save(self, "frontier", path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Frontier":
        """Read a file that `save` wrote."""
        return json_files.load(cls, "frontier", path)

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        if not self.points:
            return "<Frontier: no points>"
        first, last = self.points[0], self.points[-1]
        points = format_count(len(self), "point")
        peaks = f"{format_bytes(first.peak)} to {format_bytes(last.peak)}"
        times = f"{first.plan.slowdown:.2f}x to {last.plan.slowdown:.2f}x the time"
        return f"<Frontier of {first.plan.model}: {points}, {peaks}, {times}>"

    def _repr_html_(self) -> str:
        return as_html(self)
