"""Writes the pages of plans, profiles and explanations, and the snapshots beside them."""

import os
import pickle
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rekindle.explanation.types import Explanation
from rekindle.planner.as_page import PageRequest, as_page
from rekindle.planner.devices import device_called, usable_bytes
from rekindle.planner.find_frontier import find_frontier
from rekindle.planner.frontier import Frontier
from rekindle.planner.plan import Plan
from rekindle.planner.plan_for_budget import (
    BudgetError,
    plain_candidates,
    plain_prediction,
    plan_by,
    solved,
)
from rekindle.planner.progress import Progress, show_progress
from rekindle.planner.timeline import simulate
from rekindle.planner.types import Profile
from rekindle.report.page.document import Content, page_document, stops_of
from rekindle.report.page.html import page_html
from rekindle.report.page.plans import FOR_DEVICE, NO_PLAN, YOURS, Stop
from rekindle.report.snapshot import snapshot_of_explanation, snapshot_of_plan
from rekindle.strategy import Recompute


@as_page.register
def write_plan_page(plan: Plan, request: PageRequest) -> Path:
    """Write the page of a plan; its profile and an explanation show more."""
    profile = request.profile or plan.profile
    snapshot = None
    if request.snapshot is not None:
        if profile is None:
            raise ValueError(
                "The plan was loaded without its profile, which a snapshot is made of: "
                "plan.report(path, snapshot=..., profile=rekindle.Profile.load(...))"
            )
        snapshot = snapshot_of_plan(profile, plan)
    return _write(request, _content(profile, plan, request), snapshot)


@as_page.register
def write_profile_page(profile: Profile, request: PageRequest) -> Path:
    """Write the page of a profile: its plans."""
    snapshot = None
    if request.snapshot is not None:
        snapshot = snapshot_of_plan(profile, _plain_plan(profile))
    return _write(request, _content(profile, None, request), snapshot)


@as_page.register
def write_frontier_page(frontier: Frontier, request: PageRequest) -> Path:
    """Write the page of a frontier: its points."""
    if not frontier.points:
        raise ValueError("The frontier has no points, so there is nothing to show")
    profile = request.profile or frontier.points[0].plan.profile
    stops = stops_of([point.plan for point in frontier], {})
    others = _others(profile, request)
    device_bytes = _memory_of(profile, request.explanation)
    content = Content(profile, stops, len(stops) - 1, others, request.explanation, device_bytes)
    return _write(request, content, None)


@as_page.register
def write_explanation_page(explanation: Explanation, request: PageRequest) -> Path:
    """Write the page of an explanation; with its plans, if it was not loaded from a file."""
    snapshot = None
    if request.snapshot is not None:
        if not explanation.allocations:
            raise ValueError(
                "The explanation was loaded from a file, which has no single storages to make a "
                "snapshot of: report() the explanation that rekindle.explain returned"
            )
        snapshot = snapshot_of_explanation(explanation)
    profile = explanation.profile
    content = Content(explanation=explanation, device_bytes=explanation.device_bytes)
    if profile is not None and find_spec("scipy") is not None:
        content = _content(profile, None, replace(request, explanation=explanation))
    return _write(request, replace(content, is_explained_first=True), snapshot)


def _content(profile: Profile | None, plan: Plan | None, request: PageRequest) -> Content:
    """Return what a page shows: the plans of the frontier, if there is a profile to solve by."""
    explanation, others = request.explanation, _others(profile, request)
    device_bytes = _memory_of(profile, explanation)
    if profile is None:
        assert plan is not None, "a page is of a plan or of a profile"
        alone = Stop(plan, (YOURS,))
        return Content(None, (alone,), 0, others, explanation, device_bytes)
    frontier, for_device = list[Plan](), None
    if find_spec("scipy") is not None:
        with show_progress(Progress()):
            frontier = [point.plan for point in find_frontier(profile, request.points)]
            for_device = _plan_for(profile, device_bytes)
    named = {NO_PLAN: _plain_plan(profile), FOR_DEVICE: for_device, YOURS: plan}
    stops = stops_of(frontier, named)
    wanted = [label for label in (YOURS, FOR_DEVICE, NO_PLAN) if named[label] is not None]
    chosen = next(i for i, stop in enumerate(stops) if wanted[0] in stop.labels)
    return Content(profile, stops, chosen, others, explanation, device_bytes)


def _memory_of(profile: Profile | None, explanation: Explanation | None) -> int | None:
    """The memory of the device; None if it is not known, or not for the step alone."""
    if explanation is not None:
        return explanation.device_bytes
    device = None if profile is None else device_called(profile.device)
    return None if device is None or device.name == "cpu" else device.memory_bytes


def _plan_for(profile: Profile, device_bytes: int | None) -> Plan | None:
    """The plan for all that a device has room for; None if none is needed, or none fits."""
    if device_bytes is None or plain_prediction(profile).peak <= usable_bytes(device_bytes):
        return None
    try:
        return solved(profile, usable_bytes(device_bytes))
    except BudgetError:
        return None


def _others(profile: Profile | None, request: PageRequest) -> dict[str, tuple[int, float]]:
    """Steps to draw beside the plans: those that were given, and what most people do by hand."""
    given = dict(request.others or {})
    if profile is None:
        return given
    menus = (profile.candidates(i) for i in range(len(profile.order)))
    found = simulate(profile, [next(c for c in m if c.strategy == Recompute()) for m in menus])
    return {"every block recomputed": (found.peak, found.seconds), **given}


def _plain_plan(profile: Profile) -> Plan:
    """The step without a plan, as a plan."""
    prediction = plain_prediction(profile)
    return plan_by(profile, prediction.peak, plain_candidates(profile), prediction, 0.0)


def _write(request: PageRequest, content: Content, snapshot: Any) -> Path:
    path = Path(os.fspath(request.path))
    path.write_text(page_html(page_document(content)), encoding="utf-8")
    if snapshot is not None and request.snapshot is not None:
        # Torch's page reads up to protocol 4.
        Path(os.fspath(request.snapshot)).write_bytes(pickle.dumps(snapshot, protocol=4))
    return path
