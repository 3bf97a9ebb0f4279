"""Explains the memory of a model's training step: records the step, and asks a profile for changes.

The profile comes first: it is made without ever running the step as it is, so it tells whether that
fits the device. If not, the step is recorded on fake tensors; and where these cannot run it, on its
device with every block recomputed.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rekindle.errors import RekindleError
from rekindle.explanation.allocations import allocations
from rekindle.explanation.changes import find_changes
from rekindle.explanation.record import StepRecord, record_step
from rekindle.explanation.saved import saved_activations
from rekindle.explanation.static_shares import Held, kinds_of, static_shares
from rekindle.explanation.step_changes import StepFacts
from rekindle.explanation.summarize import (
    Walk,
    format_moment,
    shares,
    timeline,
    walk,
)
from rekindle.explanation.types import Explanation, Source
from rekindle.modules.apply_strategies import apply_strategies, undo
from rekindle.modules.unwrapping import class_name, in_places, places
from rekindle.planner.devices import Device, OpClock, device_named
from rekindle.planner.fake_profile import Like
from rekindle.planner.loss import Loss
from rekindle.planner.measure.preserve_model_state import repeatable
from rekindle.planner.measure.static_memory import optimizer_bytes
from rekindle.planner.placement import compute_device, free_bytes
from rekindle.planner.plan_for_budget import plain_prediction
from rekindle.planner.trace.fake_tensors import (
    CPU,
    refuse_what_has_no_fake,
    with_fake_tensors,
)
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import Profile


@dataclass(frozen=True)
class Request:
    """A user's call of `explain`."""

    model: nn.Module
    batch: Any
    loss: Loss | None
    optimizer: Any
    profile: Profile
    on_meta: bool
    like: Like
    loss_by_rows: str
    """The code of a loss that goes by rows."""


@dataclass(frozen=True)
class _Recorded:
    """A recorded step, with the bytes that are there all the time."""

    source: Source
    record: StepRecord
    static: dict[Held, int]


def explain_model(request: Request) -> Explanation:
    """Return an account of a profiled step's memory; the model ends as it was."""
    profile = request.profile
    recorded = _recorded(request)
    record, found = recorded.record, walk(recorded.record)
    static = kinds_of(recorded.static.items())
    classes = {
        path: class_name(request.model.get_submodule(place))
        for path, place in places(request.model).items()
    }
    summed = shares(record, found, recorded.static, classes)
    device_bytes = _memory_of(request)
    facts = _facts(request, record, found, recorded.static, device_bytes)
    changes = find_changes(profile, facts)
    return Explanation(
        model=profile.model,
        device=profile.device,
        batch=profile.batch,
        loss=profile.loss,
        source=recorded.source,
        peak=sum(static.values()) + found.peak,
        peak_at=format_moment(record, found.peak_event, profile.model),
        static_bytes=sum(static.values()),
        device_bytes=device_bytes,
        seconds=plain_prediction(profile).seconds,
        kinds=summed.kinds,
        modules=summed.modules,
        ops=summed.ops,
        lines=summed.lines,
        timeline=timeline(record, found, static),
        saved=saved_activations(record, found.at_peak),
        changes=changes.useful,
        others=changes.others,
        unhelpful=changes.unhelpful,
        profile=profile,
        allocations=allocations(record),
    )


def _recorded(request: Request) -> _Recorded:
    """Record the step: as it is, if it fits; else without memory, or with blocks recomputed."""
    if request.on_meta:
        return _recorded_on_fakes(request)
    device = compute_device(request.model)
    if _has_room(request.profile, device):
        try:
            return _recorded_on(request, device)
        except torch.OutOfMemoryError:
            pass  # the profile was optimistic
        if device.type == "cuda":
            torch.cuda.empty_cache()
    try:
        return _recorded_on_fakes(request)
    except (RekindleError, ValueError):
        return _recorded_on(request, device, recompute=True)


def _has_room(profile: Profile, device: torch.device) -> bool:
    """Return whether the step is predicted to fit the device."""
    free = free_bytes(device)
    return free is None or plain_prediction(profile).peak - profile.static_bytes <= free


def _recorded_on(request: Request, device: torch.device, recompute: bool = False) -> _Recorded:
    """Record the step on its device."""
    step = TrainingStep(request.model, request.batch, request.loss)
    static = _static(request, step, device)
    with repeatable(step), ExitStack() as stack:
        undo(step.model)  # strategies that were applied by hand; they come back at the end
        if recompute:
            paths = (path for path, _ in request.profile.order)
            strategies = in_places(step.model, dict.fromkeys(paths, "recompute"))
            apply_strategies(step.model, strategies)
            stack.callback(undo, step.model)
        record = record_step(step, device)
    return _Recorded("recompute" if recompute else "device", record, static)


def _recorded_on_fakes(request: Request) -> _Recorded:
    """Record the step without memory, timed by the table of devices if the device is there."""
    refuse_what_has_no_fake(request.model)
    device = _device(request)
    with ExitStack() as stack:
        on = with_fake_tensors(request.model, request.batch, as_on=request.profile.device)
        batch = stack.enter_context(on)
        now: Callable[[], float] | None = None
        if device is not None:
            clock = stack.enter_context(OpClock(device))
            now = _since_start(clock)
        step = TrainingStep(request.model, batch, request.loss)
        static = _static(request, step, CPU)
        stack.enter_context(repeatable(step))
        undo(step.model)
        record = record_step(step, CPU, now)
    return _Recorded("fake tensors", record, static)


def _since_start(clock: OpClock) -> Callable[[], float]:
    begin = clock.mark()
    return lambda: clock.seconds(begin, clock.mark())


def _static(request: Request, step: TrainingStep, device: torch.device) -> dict[Held, int]:
    state = optimizer_bytes(request.optimizer, None if request.on_meta else device)
    total = request.profile.static_bytes
    return dict(static_shares(step.model, device, step.batch_tensors(), state, total))


def _device(request: Request) -> Device | None:
    """The device of the table that a profile is of; None if it is not there."""
    if isinstance(request.like, Device):
        return request.like
    try:
        return device_named(request.profile.device)
    except ValueError:
        return None


def _memory_of(request: Request) -> int | None:
    """The memory of the device; None for a CPU, whose memory is not for the step alone."""
    if not request.on_meta:
        device = compute_device(request.model)
        if device.type == "cuda":
            return torch.cuda.get_device_properties(device).total_memory
    device_named_so = _device(request)
    if device_named_so is None or device_named_so.name == "cpu":
        return None
    return device_named_so.memory_bytes


def _facts(
    request: Request,
    record: StepRecord,
    found: Walk,
    static: dict[Held, int],
    device_bytes: int | None,
) -> StepFacts:
    """Facts about the step that changes are predicted from."""
    kinds = kinds_of(static.items())
    total = sum(kinds.values())
    trained = [p for p in dict.fromkeys(request.model.parameters()) if p.requires_grad]
    nbytes = sum(p.nbytes for p in trained)
    return StepFacts(
        record=record,
        model=request.profile.model,
        peak=total + found.peak,
        peak_at=format_moment(record, found.peak_event, request.profile.model),
        static_bytes=total,
        gradient_bytes=kinds["gradients"],
        parameter_bytes=kinds["parameters"],
        batch_bytes=kinds["batch"],
        optimizer_bytes=kinds["optimizer"],
        optimizer_elements=kinds["optimizer"] * sum(p.numel() for p in trained) // max(nbytes, 1),
        device_bytes=device_bytes,
        samples=_samples(request),
        loss_by_rows=request.loss_by_rows,
    )


def _samples(request: Request) -> int | None:
    """The number of samples, if all tensors of the batch have as many rows."""
    step = TrainingStep(request.model, request.batch, request.loss)
    rows = {tensor.shape[0] for tensor in step.batch_tensors() if tensor.dim()}
    return rows.pop() if len(rows) == 1 else None
