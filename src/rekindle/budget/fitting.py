"""A plan that was tried out: what is measured decides."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from rekindle.budget import profiling
from rekindle.budget.agreement import agreed, highest
from rekindle.budget.memory import metered
from rekindle.budget.plan import Plan
from rekindle.budget.planning import BudgetError, budget_bytes, plan_by, solved, with_nearby
from rekindle.budget.progress import tell
from rekindle.budget.shapes import elements
from rekindle.budget.standing import Fitting, keep_fitted, plan_of
from rekindle.budget.step import Call, Step
from rekindle.budget.timing import timed
from rekindle.budget.untouched import repeatable
from rekindle.budget.values import Profile
from rekindle.modules.application import apply, undo
from rekindle.sizes import format_bytes

_log = logging.getLogger("rekindle")
_TRIES = 4
_LEARNING = 4
"""Steps after which offload has learnt what it can."""


def fit_again(model: nn.Module, call: Call, fitting: Fitting) -> Plan:
    """Fit a model that was fitted before, to a larger call of it."""
    measured = _measured_again(model, call, fitting)
    if measured.loss != "given":
        fitting = replace(fitting, loss=None)
        before = plan_of(model)
        if before is not None:  # what is outside the model is not seen: taken to grow too
            larger = elements(measured.inputs), max(elements(before.inputs), 1)
            fitting = fitting.grown(*larger)
            rest = max(measured.rest_peak, fitting.rest_peak)
            measured = replace(measured, rest_peak=rest, output_held=fitting.output_held)
    plan = fitted(Step(model, call, fitting.loss), fitting.budget, measured)
    apply(model, plan)
    keep_fitted(model, fitting)
    return plan


def _measured_again(model: nn.Module, call: Call, fitting: Fitting) -> Profile:
    """The profile of a larger call; without the loss that was given, if it fails on that.

    It may know the labels of the first batch alone, as `lambda out: criterion(out, labels)` does.
    """
    bench = profiling.bench_of(next(model.parameters()).device, fitting.spill)
    state = fitting.optimizer_bytes
    if fitting.loss is None:
        return profiling.measure(model, call, state, bench)
    try:
        return profiling.measure(model, call, state, bench, fitting.loss)
    except Exception:
        if not fitting.loss.failed:
            raise
    return profiling.measure(model, call, state, bench)


def fitted(step: Step, budget: int | str, measured: Profile) -> Plan:
    """The plan for a budget that was tried out; the model ends as it was."""
    limit = budget_bytes(measured, budget)
    plan = fastest_within(step, limit, measured)
    return _for_budget(with_nearby(measured, plan), limit)


def fastest_within(step: Step, limit: int, measured: Profile) -> Plan:
    """A plan that was measured to be within a limit, and fast.

    A step that takes longer than was predicted is compared with plans of fewer means: without
    offload, then without going op by op. What is measured decides.
    """
    plan = _verified(step, limit, measured)
    for profile in _with_fewer_means(measured, plan):
        assert plan.measured_time is not None, "it was tried out"
        late = agreed(plan.measured_time) - plan.predicted_time
        if late <= max(_LATE * plan.predicted_time, _HARDLY):
            break
        tell("another plan")
        try:
            other = _verified(step, limit, profile)
        except BudgetError:
            continue
        assert other.measured_time is not None, "it was tried out"
        if agreed(other.measured_time < plan.measured_time):
            plan = other
    return plan


_LATE = 0.1
"""The share of what was predicted by which a step may be late."""
_HARDLY = 0.005
"""Seconds that say nothing: another step would take more, or less."""


def _with_fewer_means(profile: Profile, plan: Plan) -> Iterator[Profile]:
    """The profile without the options that move something, then without those op by op.

    As far as the plan uses such options.
    """
    from rekindle.budget import solving  # noqa: PLC0415

    if plan.offloads:
        yield solving.without_offload(profile)
    if any(option.fate == "select" for _, _, option in plan.blocks):
        yield solving.only(profile, lambda option: option.fate != "select")


def _verified(step: Step, limit: int, measured: Profile) -> Plan:
    """A plan that was tried out, and found to stay within a limit."""
    from rekindle.budget import solving  # noqa: PLC0415

    aim, peak = limit, 0
    for i in range(_TRIES):
        tell("solve")
        if i == 0:
            plan = solved(measured, aim)
        else:
            choice = solving.choose(measured, aim) if i < _TRIES - 1 else None
            choice = choice or solving.smallest(measured)  # which may take less than predicted
            plan = plan_by(measured, aim, choice.options, choice.prediction, choice.gap)
        tell("verify")
        trial = try_out(step, plan, measured)
        peak = highest(trial.peak, next(step.model.parameters()).device)
        if peak <= limit:
            return plan.measured(peak, trial.seconds)
        _log.info("the step peaks at %s: planning again", format_bytes(peak))
        aim -= peak - limit + max(limit // 200, 1)
    raise BudgetError(
        f"Plans for {format_bytes(limit)} were measured at {format_bytes(peak)}, more than was "
        "predicted. Try a larger budget."
    )


def _for_budget(plan: Plan, limit: int) -> Plan:
    """A plan for the budget that was asked for, where less was aimed at."""
    near = [
        at and replace(at, budget=at.budget + limit - plan.budget) for at in (plan.less, plan.more)
    ]
    return replace(plan, budget=limit, less=near[0], more=near[1])


class Trial(NamedTuple):
    """What a step under a plan took."""

    peak: int
    seconds: float


def try_out(step: Step, plan: Plan, measured: Profile) -> Trial:
    """The peak and the time of a step under a plan; the model ends as it was, without the plan."""
    model = step.model
    device = next(model.parameters()).device
    with repeatable(step):
        apply(model, plan)
        for _ in range(_LEARNING if plan.offloads else 1):
            step()
        known = [*model.parameters(), *model.buffers()]
        known += [p.grad for p in model.parameters() if p.grad is not None]
        known += step.tensors()
        torch.clear_autocast_cache()  # so that casts count which an autocast around `fit` holds
        with metered(device, known) as meter:
            meter.reset()
            step()
            metered_seconds = timed(step, device) if device.type == "cuda" else None
            peak = meter.peak()  # of several steps, where metering costs nothing
        seconds = timed(step, device) if metered_seconds is None else metered_seconds
        undo(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Trial(measured.static_bytes + peak, seconds)
