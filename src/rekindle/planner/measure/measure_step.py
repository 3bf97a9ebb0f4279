"""Measures a training step under a plan: its peak, its time, and fingerprints of its gradients."""

from contextlib import nullcontext
from statistics import median
from typing import NamedTuple

import torch

from rekindle.modules.apply_strategies import undo
from rekindle.modules.compiled_blocks import close_blocks
from rekindle.planner.gradient_fingerprints import GradientFingerprints
from rekindle.planner.instruments.memory_meter import metered, meters_freely
from rekindle.planner.instruments.timing import times_of
from rekindle.planner.measure.preserve_model_state import preserve_buffers, repeatable
from rekindle.planner.placement import compute_device
from rekindle.planner.plan import Plan
from rekindle.planner.runtime import apply_plan
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import Profile

_LEARNING_STEPS = 4
"""Steps after which offload has learnt what it can."""


class MeasuredStep(NamedTuple):
    """The figures of a step under a plan."""

    peak: int
    """Bytes, static ones included."""
    seconds: float
    gradients: GradientFingerprints | None = None
    """Fingerprints of its gradients, if they were asked for."""


def measure_step(
    step: TrainingStep, plan: Plan, profile: Profile, *, with_gradients: bool = False
) -> MeasuredStep:
    """Run steps under a plan, and measure one; the model ends as it was, without the plan.

    The step that is measured begins from the model's current state, and follows others that offload
    has learnt from. The gradients are those of this step.
    """
    model = step.model
    device = compute_device(model)
    is_free = meters_freely(device)  # then the steps that are timed are metered too
    with repeatable(step):
        apply_plan(model, plan)
        with preserve_buffers(model):
            for _ in range(_LEARNING_STEPS if plan.offloads else 1):
                step()
        torch.clear_autocast_cache()  # so that casts count which an autocast around `fit` holds
        gradients = None
        with metered(device, step.existing_tensors()) as meter:
            meter.reset()
            if with_gradients:
                gradients = step.fingerprints()
            else:
                step()
            peak = meter.peak()
        with metered(device) if is_free else nullcontext(meter) as meter:
            seconds = median(times_of(step, device))
            # Fingerprints take some memory of the device, where a meter sees all there is.
            of_gradients = is_free and with_gradients
            peak = meter.peak() if of_gradients else max(peak, meter.peak())
        undo(model)
        close_blocks(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return MeasuredStep(profile.static_bytes + peak, seconds, gradients)
