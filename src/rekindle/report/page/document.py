"""The document of a page: one value of plain JSON, which the page's scripts read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.explanation.types import Explanation
from rekindle.planner.plan import Plan
from rekindle.planner.types import Profile
from rekindle.report.page.explained import explanation_document
from rekindle.report.page.plans import YOURS, Stop, plans_document


@dataclass(frozen=True)
class Content:
    """Everything that a page shows."""

    profile: Profile | None = None
    stops: tuple[Stop, ...] = ()
    """From the lowest peak up."""
    chosen: int = 0
    """The index of the stop that is shown first."""
    others: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    explanation: Explanation | None = None
    device_bytes: int | None = None
    """The memory of the device; None where it is not known."""
    is_explained_first: bool = False
    """True if the explanation stands above the plans."""


def page_document(content: Content) -> dict[str, Any]:
    """Return all that a page shows as plain values."""
    about = content.profile or content.explanation or content.stops[0].plan
    explanation = content.explanation
    plans = None
    if content.stops:
        plans = plans_document(content.profile, content.stops, content.others)
        plans["chosen"] = content.chosen
        plans["plain"] = next(
            (i for i, stop in enumerate(content.stops) if stop.plan.keeps_all), None
        )
    return {
        "schema": "rekindle page",
        "version": 1,
        "model": about.model,
        "device": about.device,
        "batch": about.batch,
        "device_bytes": content.device_bytes,
        "first": "explanation" if content.is_explained_first else "plans",
        "plans": plans,
        "explanation": None if explanation is None else explanation_document(explanation),
    }


def _does_the_same(one: Plan, other: Plan) -> bool:
    return (one.blocks, one.heads) == (other.blocks, other.heads)


def stops_of(frontier: Sequence[Plan], named: Mapping[str, Plan | None]) -> tuple[Stop, ...]:
    """Return the plans of a frontier, and others with their labels, as stops.

    They go from the lowest peak up. A plan that is on the frontier is one stop with it.
    """
    plans, labels = list(frontier), dict[int, list[str]]()
    for label, plan in named.items():
        if plan is None:
            continue
        same = next((i for i, each in enumerate(plans) if _does_the_same(each, plan)), None)
        if same is None:
            same = len(plans)
            plans.append(plan)
        elif label == YOURS:  # it may have been measured
            plans[same] = plan
        labels.setdefault(same, []).append(label)
    stops = [Stop(plan, tuple(labels.get(i, ()))) for i, plan in enumerate(plans)]
    stops.sort(key=lambda stop: (stop.plan.predicted_peak, -stop.plan.predicted_time))
    return tuple(stops)
