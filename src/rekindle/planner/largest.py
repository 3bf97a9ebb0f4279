"""The largest batch or sequence that fits a budget, as a value: frozen, printed, saved as JSON.

Nothing here imports torch.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rekindle.planner import json_files
from rekindle.planner.as_html import as_html
from rekindle.planner.as_text import as_text
from rekindle.planner.json_schema import Inconsistency
from rekindle.planner.plan import Plan
from rekindle.planner.types import Scalar
from rekindle.sizes import format_bytes

Over: TypeAlias = Literal["batch", "sequence"]
"""The size that grows: the number of samples, or the length of each."""
Unit: TypeAlias = Literal["samples", "tokens"]
"""The items that throughput counts."""


@dataclass(frozen=True)
class TriedSize:
    """One size that was tried, with its plan if there is one within the budget."""

    size: int
    items: int
    """Samples or tokens in a step."""
    peak: int | None
    """The predicted peak; where no plan fits, the least that any plan has, if that is known."""
    plan: Plan | None

    @property
    def fits(self) -> bool:
        """True if there is a plan within the budget."""
        return self.plan is not None

    @property
    def seconds(self) -> float | None:
        """The predicted time of a step; None where no plan fits."""
        return None if self.plan is None else self.plan.predicted_time

    @property
    def per_second(self) -> float:
        """Samples or tokens a second; 0 where no plan fits."""
        return self.items / self.seconds if self.seconds else 0.0

    def __repr__(self) -> str:
        return f"<TriedSize {self.size}: {'fits' if self.fits else 'does not fit'}>"


@dataclass(frozen=True)
class Largest:
    """The largest batch or sequence whose training step fits a budget, and all sizes tried."""

    model: str
    device: str
    over: Over
    unit: Unit
    budget: int
    multiple_of: int
    size: int
    """The largest size that fits: the next multiple was tried and does not, unless `capped`."""
    capped: bool
    """True if it is the largest that was allowed: a larger one may fit, too."""
    tried: tuple[TriedSize, ...]
    """The sizes that were tried, the smallest first."""

    def inconsistencies(self) -> Iterator[Inconsistency]:
        """Places where fields of the right types contradict each other, with what is wrong."""
        if not any(each.size == self.size and each.fits for each in self.tried):
            yield "size", f"should be one that was tried and fits, but is {self.size}"

    @property
    def largest(self) -> TriedSize:
        """The largest size that fits."""
        return next(each for each in self.tried if each.size == self.size)

    @property
    def best(self) -> TriedSize:
        """Of the sizes that were tried, the one with most samples or tokens a second."""
        return max(self.tried, key=lambda each: each.per_second)

    @property
    def plan(self) -> Plan:
        """The plan for the largest size."""
        plan = self.largest.plan
        assert plan is not None
        return plan

    def as_dict(self) -> dict[str, list[Scalar | None]]:
        """A column for each figure, as a data frame takes them: a row for each size tried.

        Where no plan fits, there is no time: None.
        """
        names = ("size", "items", "fits", "peak", "seconds", "per_second")
        return {name: [getattr(each, name) for each in self.tried] for name in names}

    def as_json(self) -> dict[str, Any]:
        """The values, with all plans: all that the file has."""
        return json_files.as_json(self, "largest")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        json_files.save(self, "largest", path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Largest":
        """Read a file that `save` wrote."""
        return json_files.load(cls, "largest", path)

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        within = f"{self.device} within {format_bytes(self.budget)}"
        return f"<Largest {self.over} of {self.model} on {within}: {self.size}>"

    def _repr_html_(self) -> str:
        return as_html(self)
