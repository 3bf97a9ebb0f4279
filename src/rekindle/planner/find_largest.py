"""Finds the largest size that fits a budget, with a plan for each size that is tried.

```
size ─measure─▶ Profile ─least_peak─▶ does it fit? ─largest_within─▶ the next size … ─▶ Largest
```

Whether a size fits is arithmetic on its profile; plans are solved for afterwards, for the sizes
that fit. Besides the sizes of the search, those are tried at which throughput may be best: the
largest that fits without a plan, and halves of the largest.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rekindle.planner.largest import Largest, Over, TriedSize, Unit
from rekindle.planner.largest_search import crossing, halvings, largest_within
from rekindle.planner.plan_for_budget import (
    BudgetError,
    least_recompute_peak,
    plain_prediction,
    solved,
    with_nearby,
)
from rekindle.planner.progress import count_progress, report_progress
from rekindle.planner.types import Profile

_MOST_UNITS = 2**20
"""Multiples beyond which nothing is tried: a step that still fits does not depend on the size."""
_HALVINGS = 3
"""Sizes that are tried for their throughput alone, besides the largest without a plan."""


@dataclass(frozen=True)
class MeasuredSize:
    """The profile of a step at one size; None if the device ran out of memory."""

    profile: Profile | None
    items: int
    unit: Unit


@dataclass(frozen=True)
class LargestRequest:
    """A user's call of `largest`."""

    budget: int
    over: Over
    multiple_of: int
    most: int | None


def find_largest(measure: Callable[[int], MeasuredSize], request: LargestRequest) -> Largest:
    """Return the largest size that fits, and plans for all sizes that were tried and fit."""
    sizes = _Sizes(measure, request)
    step = request.multiple_of
    highest = _MOST_UNITS if request.most is None else request.most // step
    found = step * largest_within(lambda units: sizes.least(units * step), request.budget, highest)
    if not found:
        raise sizes.error_at(step)
    if found == _MOST_UNITS * step:
        raise ValueError(
            f"A {request.over} of {found} fits as well: does make_batch use its size? most= sets "
            "where the search ends."
        )
    for size in sizes.worth_trying(found):
        sizes.measured(size)
    tried = [sizes.tried(size, found) for size in count_progress(sizes.known(), "plan")]
    first = sizes.profile(step)
    return Largest(
        model=first.model,
        device=first.device,
        over=request.over,
        unit=sizes.measured(step).unit,
        budget=request.budget,
        multiple_of=step,
        size=found,
        capped=found == highest * step,
        tried=tuple(tried),
    )


class _Sizes:
    """The sizes that have been measured, each once."""

    def __init__(self, measure: Callable[[int], MeasuredSize], request: LargestRequest) -> None:
        self._measure = measure
        self._request = request
        self._known: dict[int, MeasuredSize] = {}

    def measured(self, size: int) -> MeasuredSize:
        """The measurement of a size, which is made once."""
        if size not in self._known:
            report_progress(f"{self._request.over} of {size}")
            self._known[size] = self._measure(size)
        return self._known[size]

    def known(self) -> list[int]:
        """The sizes that have been measured, the smallest first."""
        return sorted(self._known)

    def profile(self, size: int) -> Profile:
        """The profile of a size for which the device has room."""
        profile = self.measured(size).profile
        assert profile is not None
        return profile

    def least(self, size: int) -> float:
        """The least peak that any plan has; infinite if the device ran out of memory."""
        from rekindle.planner.solve import solver  # noqa: PLC0415

        if self.measured(size).profile is None:
            return float("inf")
        profile = self.profile(size)
        least = solver.least_peak(profile).prediction.peak
        return min(least, least_recompute_peak(profile) or least)

    def worth_trying(self, largest: int) -> list[int]:
        """Sizes up to the largest at which throughput may be best."""
        step, found = self._request.multiple_of, largest // self._request.multiple_of
        measured = [size for size in self.known() if self.measured(size).profile is not None]
        peaks = {size // step: plain_prediction(self.profile(size)).peak for size in measured}
        fitting = [units for units in peaks if peaks[units] <= self._request.budget]
        plain = [crossing(peaks, self._request.budget, max(fitting), found)] if fitting else []
        return [units * step for units in [*plain, *halvings(found, {*peaks, *plain}, _HALVINGS)]]

    def tried(self, size: int, largest: int) -> TriedSize:
        """A size with its throughput; with a plan, if it is not above the largest that fits."""
        items = self.measured(size).items
        if size > largest:
            least = self.least(size)
            return TriedSize(size, items, None if least == float("inf") else int(least), None)
        plan = solved(self.profile(size), self._request.budget)
        if size == largest:
            plan = with_nearby(self.profile(size), plan)
        return TriedSize(size, items, plan.predicted_peak, plan)

    def error_at(self, size: int) -> BudgetError:
        """The error where not even the smallest size fits."""
        reason = "the device runs out of memory."
        if self.measured(size).profile is not None:
            try:
                solved(self.profile(size), self._request.budget)
            except BudgetError as error:
                reason = str(error)
        return BudgetError(f"A {self._request.over} of {size} does not fit. {reason}")
