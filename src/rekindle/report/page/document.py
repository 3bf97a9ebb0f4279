"""The document of a page: one value of plain JSON, which the page's scripts read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.explanation.types import Explanation
from rekindle.planner.plan import Plan
from rekindle.planner.types import Profile
from rekindle.report.page.explained import explanation_document
from rekindle.report.page.plans import Stop, plans_document


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


def page_document(content: Content) -> dict[str, Any]:
    """Return all that a page shows as plain values."""
    about = content.profile or content.explanation or content.stops[0].plan
    explanation = content.explanation
    plans = None
    if content.stops:
        plans = plans_document(content.profile, content.stops, content.others)
        plans["chosen"] = content.chosen
    return {
        "schema": "rekindle page",
        "version": 1,
        "model": about.model,
        "device": about.device,
        "batch": about.batch,
        "device_bytes": None if explanation is None else explanation.device_bytes,
        "plans": plans,
        "explanation": None if explanation is None else explanation_document(explanation),
    }


def stops_of(frontier: Sequence[Plan], given: Plan | None, plain: Plan | None) -> list[Stop]:
    """Return the plans of a frontier, a plan that was given and the plain step as stops.

    They go from the lowest peak up. A plan that is on the frontier is one stop with it.
    """
    labels: dict[int, list[str]] = {}
    plans = list(frontier)
    for plan, label in ((plain, "no plan"), (given, "your plan")):
        if plan is None:
            continue
        same = next((i for i, each in enumerate(plans) if each.blocks == plan.blocks), None)
        if same is None:
            same = len(plans)
            plans.append(plan)
        elif plan is given:  # it may have been measured
            plans[same] = plan
        labels.setdefault(same, []).append(label)
    stops = [Stop(plan, tuple(labels.get(i, ()))) for i, plan in enumerate(plans)]
    return sorted(stops, key=lambda stop: (stop.plan.predicted_peak, -stop.plan.predicted_time))
