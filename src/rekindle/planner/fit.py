"""A plan that was tried out: what is measured decides."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from rekindle.planner import profile_model
from rekindle.planner.caller_warnings import warn_at_caller
from rekindle.planner.gradient_fingerprints import Fingerprints
from rekindle.planner.input_shapes import count_elements
from rekindle.planner.measure.measured_step import Trial, try_out
from rekindle.planner.placement import compute_device
from rekindle.planner.plan import Plan
from rekindle.planner.plan_for_budget import (
    BudgetError,
    budget_bytes,
    plain_options,
    plain_prediction,
    plan_by,
    plan_chosen,
    solved,
    with_nearby,
)
from rekindle.planner.progress import report_progress
from rekindle.planner.ranks.rank_sync import all_gather, has_other_ranks, raised_on_all_ranks
from rekindle.planner.runtime import Fitting, Verify, apply_plan, keep_fitted, plan_of
from rekindle.planner.training_step import ModelCall, TrainingStep
from rekindle.planner.types import Profile, Solution
from rekindle.planner.verify import GradientError, verify_gradients
from rekindle.sizes import format_bytes
from rekindle.strategy import Keep, Recompute, Selective

_log = logging.getLogger("rekindle")
_TRIES = 4
AFFORDABLE_SECONDS = 60.0
"""With `verify="auto"`: how long a step may be predicted to take for one more to be run."""


def fit_again(model: nn.Module, call: ModelCall, fitting: Fitting) -> Plan:
    """Fit a model that was fitted before, to a larger call of it."""
    measured = _measured_again(model, call, fitting)
    if measured.loss != "given":
        fitting = replace(fitting, loss=None)
        before = plan_of(model)
        if before is not None:  # what is outside the model is not seen: taken to grow too
            larger = count_elements(measured.inputs), max(count_elements(before.inputs), 1)
            fitting = fitting.grown(*larger)
            rest = max(measured.rest_peak, fitting.rest_peak)
            measured = replace(measured, rest_peak=rest, output_held=fitting.output_held)
    plan = fitted(TrainingStep(model, call, fitting.loss), fitting.budget, measured, fitting.verify)
    if measured.loss != "given" and fitting.rest_peak:  # nor is it in a step that is measured
        plan = replace(plan, plain_peak=max(plan.plain_peak, plain_prediction(measured).peak))
    apply_plan(model, plan)
    keep_fitted(model, fitting)
    return plan


def _measured_again(model: nn.Module, call: ModelCall, fitting: Fitting) -> Profile:
    """The profile of a larger call; without the loss that was given, if it fails on that.

    It may know the labels of the first batch alone, as `lambda out: criterion(out, labels)` does.
    """
    bench = profile_model.bench_of(compute_device(model), fitting.spill)
    state = fitting.optimizer_bytes
    if fitting.loss is None:
        return profile_model.measure(model, call, state, bench)
    try:
        return profile_model.measure(model, call, state, bench, fitting.loss)
    except Exception:
        if not fitting.loss.failed:
            raise
    return profile_model.measure(model, call, state, bench)


def fitted(step: TrainingStep, budget: int | str, measured: Profile, verify: Verify) -> Plan:
    """The plan for a budget that was tried out; the model ends as it was."""
    limit = budget_bytes(measured, budget)
    plain = _tried_as_it_is(step, limit, measured)
    if plain is not None and _peak(plain) <= limit:
        plan = plain
    else:
        plan = fastest_within(step, limit, measured, verify)
        if plain is not None:
            plan = replace(plan, plain_peak=plain.plain_peak, plain_time=plain.plain_time)
    return _for_budget(with_nearby(measured, plan), limit)


def _tried_as_it_is(step: TrainingStep, limit: int, measured: Profile) -> Plan | None:
    """The step without a plan, measured, if it is predicted to fit: then there is no need of one.

    As a plan whose blocks all keep what they keep, and which changes none of them.
    """
    prediction = plain_prediction(measured)
    if prediction.peak > limit:
        return None
    report_progress("plain step")
    plan = plan_by(measured, limit, plain_options(measured), prediction, 0.0)
    trial = _tried_out(step, plan, measured, with_gradients=False)
    if trial is None:
        return None
    peak, seconds = _most(trial)
    return replace(plan.measured(peak, seconds), plain_peak=peak, plain_time=seconds)


def fastest_within(
    step: TrainingStep, limit: int, measured: Profile, verify: Verify = "peak"
) -> Plan:
    """A plan that was measured to be within a limit, and fast; with right gradients.

    A plan whose gradients are wrong gives way to one that keeps or recomputes whole blocks, if that
    has the right ones and fits; a warning says so.
    """
    plan, found = _fastest(step, limit, measured, verify)
    if found is None:
        return plan
    report_progress("compare gradients")
    try:
        return replace(plan, verified=verify_gradients(step, plan, found, measured, limit))
    except GradientError as error:
        if all(candidate.strategy in _WHOLE for _, _, candidate in plan.blocks):
            raise
        other = _of_whole_blocks(step, limit, measured, error)
        warn_at_caller(
            f"{error}\nA plan that keeps or recomputes whole blocks is applied instead: its "
            "gradients are right."
        )
        return other


def _of_whole_blocks(
    step: TrainingStep, limit: int, measured: Profile, error: GradientError
) -> Plan:
    """The fastest plan without the means that may be wrong; the error if there is no such plan."""
    from rekindle.planner.solve import solver  # noqa: PLC0415

    whole = solver.only(measured, lambda candidate: candidate.strategy in _WHOLE)
    try:
        plan, found = _fastest(step, limit, whole, "gradients")
        assert found is not None, "they were asked for"
        verified = verify_gradients(step, plan, found, whole, limit)
    except (BudgetError, GradientError):
        raise error from None
    if verified is None:  # there was nothing to compare it with
        raise error
    return replace(plan, verified=verified)


_WHOLE = (Keep(), Recompute())


_Tried = tuple[Plan, Fingerprints | None]
"""A plan that was tried out, with the gradients of a step under it, if they are to be compared."""


def _fastest(step: TrainingStep, limit: int, measured: Profile, verify: Verify) -> _Tried:
    """A plan that was measured to be within a limit, and fast.

    A step that takes longer than was predicted is compared with plans of fewer means: without
    offload, then without going op by op. What is measured decides.
    """
    best = _within(step, limit, measured, verify)
    for profile in _with_fewer_means(measured, best[0]):
        plan = best[0]
        late = _seconds(plan) - plan.predicted_time
        if late <= max(_LATE * plan.predicted_time, _HARDLY):
            break
        report_progress("another plan")
        try:
            other = _within(step, limit, profile, verify)
        except BudgetError:
            continue
        if _seconds(other[0]) < _seconds(plan):
            best = other
    return best


_LATE = 0.1
"""The share of what was predicted by which a step may be late."""
_HARDLY = 0.005
"""Seconds that say nothing: another step would take more, or less."""


def _seconds(plan: Plan) -> float:
    assert plan.measured_time is not None, "it was tried out"
    return plan.measured_time


def _peak(plan: Plan) -> int:
    assert plan.measured_peak is not None, "it was tried out"
    return plan.measured_peak


def _with_fewer_means(profile: Profile, plan: Plan) -> Iterator[Profile]:
    """The profile without the candidates that move something, then without those op by op.

    As far as the plan uses such candidates.
    """
    from rekindle.planner.solve import solver  # noqa: PLC0415

    if plan.offloads:
        yield solver.without_offload(profile)
    if any(isinstance(candidate.strategy, Selective) for _, _, candidate in plan.blocks):
        yield solver.only(profile, lambda each: not isinstance(each.strategy, Selective))


def _chosen(measured: Profile, aim: int, is_last: bool) -> Solution:
    """A choice within an aim, or one that holds least: it may take less than is predicted."""
    from rekindle.planner.solve import solver  # noqa: PLC0415

    choice = None if is_last else solver.choose(measured, aim)
    return choice or solver.smallest(measured)


def _most(trial: Trial) -> tuple[int, float]:
    """The highest peak and the longest time of all ranks' trials of one plan."""
    trials = all_gather((trial.peak, trial.seconds))
    return max(peak for peak, _ in trials), max(seconds for _, seconds in trials)


def _within(step: TrainingStep, limit: int, measured: Profile, verify: Verify) -> _Tried:
    """A plan that was tried out, and found to stay within a limit."""
    aim, peak = limit, 0
    for i in range(_TRIES):
        report_progress("solve")
        if i == 0:
            plan = solved(measured, aim)
        else:
            plan = plan_chosen(measured, aim, partial(_chosen, measured, aim, i == _TRIES - 1))
        report_progress("verify")
        compares = verify == "gradients" or (
            verify == "auto" and plan.predicted_time <= AFFORDABLE_SECONDS
        )
        trial = _tried_out(step, plan, measured, with_gradients=compares)
        if trial is None:
            aim = min(aim, plan.predicted_peak)
            aim -= max((aim - measured.static_bytes) // 10, 1)
            peak = limit + 1
            _log.info("the step runs out of memory: planning again for %s", format_bytes(aim))
            continue
        peak, seconds = _most(trial)
        if peak <= limit:
            return plan.measured(peak, seconds), trial.gradients
        _log.info("the step peaks at %s: planning again", format_bytes(peak))
        aim -= peak - limit + max(limit // 200, 1)
    found = f"measured at {format_bytes(peak)}" if peak > limit + 1 else "out of memory"
    raise raised_on_all_ranks(
        BudgetError(
            f"Plans for {format_bytes(limit)} were {found}, more than was predicted. Try a larger "
            "budget, or free what else is on the device."
        )
    )


def _tried_out(
    step: TrainingStep, plan: Plan, measured: Profile, *, with_gradients: bool
) -> Trial | None:
    """Try a plan out; None if the device runs out of memory on the way.

    Several ranks raise: the others would wait for one that does not run its step.
    """
    try:
        return try_out(step, plan, measured, with_gradients=with_gradients)
    except torch.OutOfMemoryError:
        if has_other_ranks():
            raise
    if _device(step).type == "cuda":
        torch.cuda.empty_cache()
    return None


def _for_budget(plan: Plan, limit: int) -> Plan:
    """A plan for the budget that was asked for, where less was aimed at."""
    near = [
        at and replace(at, budget=at.budget + limit - plan.budget) for at in (plan.less, plan.more)
    ]
    return replace(plan, budget=limit, less=near[0], more=near[1])


def _device(step: TrainingStep) -> torch.device:
    return compute_device(step.model)
