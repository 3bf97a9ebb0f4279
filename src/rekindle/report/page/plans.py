"""The part of a page's document that has plans: the stops of its slider."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rekindle.planner.plan import Plan
from rekindle.planner.step_walk import StepWalk, walk_step
from rekindle.planner.timeline import Timeline
from rekindle.planner.types import Candidate, Profile
from rekindle.report.page.shared import Table, rounded
from rekindle.sizes import format_budget
from rekindle.strategy import Keep

Json: TypeAlias = dict[str, Any]

CAUSES = ("outside", "held", "cached", "moving", "own")
"""The causes of memory on top of what is there all the time: the fields of `MemoryAt`."""


NO_PLAN, FOR_DEVICE, YOURS = "no plan", "for the device", "your plan"
"""Labels of stops."""


@dataclass(frozen=True)
class Stop:
    """One stop of the slider: a plan, and why it is there."""

    plan: Plan
    labels: tuple[str, ...] = ()


@dataclass
class _Tables:
    """Values that stops share."""

    candidates: Table[tuple[Candidate, int]] = field(default_factory=Table)
    """Candidates, with what plain autograd holds of the same block."""
    columns: Table[tuple[float, ...]] = field(default_factory=Table)
    names: Table[str] = field(default_factory=Table)


def plans_document(
    profile: Profile | None, stops: Sequence[Stop], others: Mapping[str, tuple[int, float]]
) -> Json:
    """Return the plans of a page as plain values, from the lowest peak up.

    Without a profile there is a single plan, and no timeline.
    """
    first, tables = stops[0].plan, _Tables()
    plain = _plain_bytes(first, profile)
    walks = [None if profile is None else _walk(profile, stop.plan) for stop in stops]
    return {
        "paths": [path for path, _, _ in first.blocks],
        "kinds": [tables.names.index(kind) for _, kind, _ in first.blocks],
        "causes": list(CAUSES),
        "static": None if profile is None else profile.static_bytes,
        "bytes_per_second": None if profile is None else profile.bytes_per_second,
        "moments": [] if walks[0] is None else _moments(walks[0]),
        "stops": [
            _stop(stop, walk, plain, profile, tables)
            for stop, walk in zip(stops, walks, strict=True)
        ],
        "others": [
            {"name": name, "peak": peak, "seconds": seconds}
            for name, (peak, seconds) in others.items()
        ],
        "candidates": [_candidate(*each) for each in tables.candidates.values()],
        "columns": [list(column) for column in tables.columns.values()],
        "names": tables.names.values(),
    }


def _walk(profile: Profile, plan: Plan) -> StepWalk:
    return walk_step(Timeline(profile.with_heads(plan.heads)), _candidates(plan))


def _candidates(plan: Plan) -> list[Candidate]:
    return [candidate for _, _, candidate in plan.blocks]


def _plain_bytes(plan: Plan, profile: Profile | None) -> list[int]:
    """Bytes that each block holds without a plan; 0 where that is not known."""
    if profile is None:
        return [0] * len(plan.blocks)
    menus = (profile.candidates(i) for i in range(len(profile.order)))
    return [max(each.bytes_held for each in menu if each.strategy == Keep()) for menu in menus]


def _moments(walk: StepWalk) -> list[Json]:
    return [{"at": each.at, "phase": each.phase, "place": each.place} for each in walk.moments]


def _stop(
    stop: Stop, walk: StepWalk | None, plain: list[int], profile: Profile | None, tables: _Tables
) -> Json:
    plan, candidates = stop.plan, _candidates(stop.plan)
    budget = plan.predicted_peak
    if YOURS in stop.labels or FOR_DEVICE in stop.labels:
        budget = max(plan.budget, budget)
    return {
        "labels": list(stop.labels),
        "budget": budget,
        "code": code_of(format_budget(budget), profile),
        "peak": plan.predicted_peak,
        "seconds": plan.predicted_time,
        "peak_at": plan.peak_at,
        "measured": _measured(plan),
        "moved": sum(each.bytes_moved for each in candidates),
        "heads": [f"{path}: {strategy}" for path, _, strategy in plan.heads],
        "choice": tables.candidates.indices(list(zip(candidates, plain, strict=True))),
        "step": None if walk is None else _step(walk, tables.columns),
    }


def code_of(budget: str, profile: Profile | None) -> str:
    """The line of code that makes a plan for a budget."""
    loss = ", loss=loss" if profile is not None and profile.loss == "given" else ""
    return f'plan = rekindle.fit(model, batch, budget="{budget}"{loss})'


def _measured(plan: Plan) -> Json | None:
    if plan.measured_peak is None or plan.measured_time is None:
        return None
    return {"peak": plan.measured_peak, "seconds": plan.measured_time}


def _step(walk: StepWalk, columns: Table[tuple[float, ...]]) -> Json:
    """The moments of a step as columns, and the copies on the link."""
    memory = zip(*(moment.memory for moment in walk.moments), strict=True)
    return {
        "begin": columns.index(tuple(rounded(moment.begin) for moment in walk.moments)),
        "end": columns.index(tuple(rounded(moment.end) for moment in walk.moments)),
        "memory": [columns.index(column) for column in memory],
        "peak": walk.peak,
        "peak_moment": walk.peak_moment,
        "seconds": walk.seconds,
        "copies": [
            [copy.place, int(copy.is_out), rounded(copy.begin), rounded(copy.end)]
            for copy in walk.copies
        ],
        "link_seconds": rounded(sum(copy.end - copy.begin for copy in walk.copies)),
    }


def _candidate(candidate: Candidate, plain: int) -> Json:
    """A candidate; `remade` are bytes of what plain autograd holds that are recomputed."""
    held, moved = candidate.bytes_held, candidate.bytes_moved
    remade = 0 if candidate.strategy == Keep() else max(plain - held - moved, 0)
    return {
        "text": candidate.describe(),
        "words": list(candidate.words),
        "held": held,
        "moved": moved,
        "remade": remade,
        "forward": rounded(max(candidate.forward_seconds, candidate.forward_host_seconds)),
        "backward": rounded(max(candidate.backward_seconds, candidate.backward_host_seconds)),
    }
