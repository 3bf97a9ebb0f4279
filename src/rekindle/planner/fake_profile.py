"""A profile without a device: bytes from fake tensors, times from a table or another profile.

Times come from the table of devices, or from a measured profile whose blocks have the same class,
parameters and inputs.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from rekindle.modules.blocks import Named
from rekindle.modules.unwrapping import class_name
from rekindle.planner.devices import Device, OpClock, device_named, device_of, known_devices
from rekindle.planner.loss import Loss
from rekindle.planner.measure.static_memory import optimizer_bytes
from rekindle.planner.profile_model import MeasuringDevice, profile_model
from rekindle.planner.rest import Rest
from rekindle.planner.trace.fake_tensors import (
    CPU,
    is_without_memory,
    refuse_what_has_no_fake,
    with_fake_tensors,
)
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import Profile

Like = str | Device | Profile | None
"""The source of times: a device by its name, a described device, a measured profile, or None for
the model's own device."""
_INF = float("inf")
_TIMELESS = Device("none", _INF, _INF, _INF, _INF, link=0.0, memory_bytes=0, launch=0.0)


def fake_profile(
    model: nn.Module,
    batch: Any,
    optimizer: Any,
    like: Like,
    loss: Loss | None = None,
    blocks: Named | None = None,
    *,
    exact: bool = True,
) -> Profile:
    """Return the profile of a model's training step as on a device that need not be there."""
    refuse_what_has_no_fake(model)
    if isinstance(like, Profile):
        return _fake_profile_by(like, model, batch, optimizer, loss, exact)
    device = table_device(model, like)
    with with_fake_tensors(model, batch, as_on=device.name) as given, OpClock(device) as clock:
        measured_on = MeasuringDevice(CPU, device.name, clock, device.bytes_per_second)
        state = optimizer_bytes(optimizer)
        return profile_model(model, given, state, measured_on, loss, blocks, exact=exact)


def _fake_profile_by(
    like: Profile, model: nn.Module, batch: Any, optimizer: Any, loss: Loss | None, exact: bool
) -> Profile:
    """Return a profile whose blocks, and times outside of them, are those of a measured one."""
    if class_name(model) != like.model:
        raise ValueError(
            f"The profile is of a {like.model}, but the model is a {class_name(model)}"
        )
    shapes = TrainingStep(model, batch).describe_batch()
    if shapes != like.batch:
        raise ValueError(
            f"The profile is of a batch of {like.batch}, but this one is of {shapes}: times of "
            "another batch do not follow from it"
        )
    with with_fake_tensors(model, batch, as_on=like.device) as given, OpClock(_TIMELESS) as clock:
        measured_on = MeasuringDevice(CPU, like.device, clock, like.bytes_per_second, known=like)
        state = optimizer_bytes(optimizer)
        found = profile_model(model, given, state, measured_on, loss, exact=exact)
        own, *rests = (_with_times_of(rest, like) for rest in (found.rest, *found.rests))
        return found.with_rests(own, *rests)


def _with_times_of(rest: Rest, like: Profile) -> Rest:
    """Return a way to run the heads with the times of a measured profile, if it has this way."""
    measured = {each.heads: each for each in (like.rest, *like.rests)}.get(rest.heads, like.rest)
    return replace(
        rest,
        rest_seconds=measured.rest_seconds,
        recompute_seconds=measured.recompute_seconds,
    )


def table_device(model: nn.Module, like: str | Device | None) -> Device:
    """Return the device whose times count: the one named or described, or else the model's own."""
    if like is not None:
        return device_named(like) if isinstance(like, str) else like
    first = next(model.parameters())
    device = None if is_without_memory(first) else device_of(first.device)
    if device is None:
        raise ValueError(
            'With device="meta", like= says which device the times are those of: a profile that '
            f"was measured, or one of {known_devices()}"
        )
    return device
