"""The rest of a step: what runs outside its blocks, such as the head and the loss, in a few ways.

A head may run by a strategy of its own, `Rows`. That changes nothing in the blocks, so each way to
run the rest is a value beside them, and the timeline is evaluated for each: they are two or three.
"""

from dataclasses import dataclass, replace

from rekindle.planner.json_schema import Difference
from rekindle.strategy import Strategy, is_exact_strategy

Heads = tuple[tuple[str, str, Strategy], ...]
"""The path, class and strategy of each head that does not run as without a plan."""


def is_exact(heads: Heads) -> bool:
    """Return whether heads run so that gradients stay bit for bit what they are without a plan."""
    return all(is_exact_strategy(strategy) for _, _, strategy in heads)


@dataclass(frozen=True)
class Rest:
    """One way to run the rest of a step; the fields are those of a profile."""

    heads: Heads
    rest_peak: Difference
    rest_seconds: float
    cached_rest_peak: int = 0
    rest_host_seconds: float = 0.0
    output_held: int = 0
    recompute_peak: int | None = None
    recompute_seconds: float | None = None

    def scaled(self, elements: int, before: int) -> "Rest":
        """Return the rest of a larger step, if all of it grows as the inputs do."""
        share = elements / before
        return replace(
            self,
            rest_peak=self.rest_peak * elements // before,
            rest_seconds=self.rest_seconds * share,
            cached_rest_peak=self.cached_rest_peak * elements // before,
            rest_host_seconds=self.rest_host_seconds * share,
            output_held=self.output_held * elements // before,
            recompute_peak=None,
            recompute_seconds=None,
        )

    def is_no_worse(self, other: "Rest") -> bool:
        """Return whether it takes neither more memory nor more time than another."""
        return all(getattr(self, name) <= getattr(other, name) for name in _COSTS)


_COSTS = ("rest_peak", "cached_rest_peak", "output_held", "rest_seconds", "rest_host_seconds")
FIELDS = (*_COSTS, "recompute_peak", "recompute_seconds")
"""Fields that a rest has in common with a profile."""
