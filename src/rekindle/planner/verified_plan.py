"""Solves for a budget until a measured step agrees: its peak, its time, and its gradients.

A step that peaks higher than the budget is solved again with a lower aim. One that takes longer
than predicted is compared with plans of fewer strategies: without offload, then without going op by
op. One whose gradients are wrong gives way to a plan that keeps or recomputes whole blocks.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from rekindle.planner.caller_warnings import warn_at_caller
from rekindle.planner.fit_request import VerifyLevel
from rekindle.planner.gradient_fingerprints import GradientFingerprints
from rekindle.planner.measure.measure_step import MeasuredStep, measure_step
from rekindle.planner.placement import compute_device
from rekindle.planner.plan import Plan
from rekindle.planner.plan_for_budget import (
    BudgetError,
    plain_candidates,
    plain_prediction,
    plan_by,
    plan_chosen,
    solved,
)
from rekindle.planner.progress import report_progress
from rekindle.planner.ranks.rank_sync import all_gather, has_other_ranks, raised_on_all_ranks
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import Profile, Solution
from rekindle.planner.verify import GradientError, verify_gradients
from rekindle.sizes import format_bytes
from rekindle.strategy import Keep, Recompute, Selective

_log = logging.getLogger("rekindle")
_TRIES = 4
AFFORDABLE_SECONDS = 60.0
"""With `verify="auto"`: the longest predicted step of which the gradients are compared."""
_LATE = 0.1
"""Share of the predicted time by which a step may be late."""
_NOISE_SECONDS = 0.005
"""Seconds of difference that say nothing: another run would take more, or less."""
_WHOLE_BLOCKS = (Keep(), Recompute())

_MeasuredPlan = tuple[Plan, GradientFingerprints | None]
"""A plan with measured peak and time, and its step's gradients, if they are to be compared."""


def measured_plain_plan(step: TrainingStep, profile: Profile, limit: int) -> Plan | None:
    """Measure the step without a plan, if it is predicted to be within a limit; else None.

    Returns a plan that keeps all, and changes no block. None if the device runs out of memory.
    """
    prediction = plain_prediction(profile)
    if prediction.peak > limit:
        return None
    report_progress("plain step")
    plan = plan_by(profile, limit, plain_candidates(profile), prediction, 0.0)
    measured = _measure_unless_oom(step, plan, profile, with_gradients=False)
    if measured is None:
        return None
    peak, seconds = _worst_of_ranks(measured)
    return replace(plan.measured(peak, seconds), plain_peak=peak, plain_time=seconds)


def fastest_verified_plan(
    step: TrainingStep, profile: Profile, limit: int, verify: VerifyLevel = "peak"
) -> Plan:
    """Return a plan that was measured to be within a limit, and fast, with right gradients."""
    plan, gradients = _fastest_measured_plan(step, profile, limit, verify)
    if gradients is None:
        return plan
    report_progress("compare gradients")
    try:
        return replace(plan, verified=verify_gradients(step, plan, gradients, profile, limit))
    except GradientError as error:
        if all(candidate.strategy in _WHOLE_BLOCKS for _, _, candidate in plan.blocks):
            raise
        other = _plan_of_whole_blocks(step, profile, limit, error)
        warn_at_caller(
            f"{error}\nA plan that keeps or recomputes whole blocks is applied instead: its "
            "gradients are right."
        )
        return other


def _plan_of_whole_blocks(
    step: TrainingStep, profile: Profile, limit: int, error: GradientError
) -> Plan:
    """Return the fastest plan that keeps or recomputes whole blocks; raise `error` without one."""
    from rekindle.planner.solve import solver  # noqa: PLC0415

    whole = solver.only(profile, lambda candidate: candidate.strategy in _WHOLE_BLOCKS)
    try:
        plan, gradients = _fastest_measured_plan(step, whole, limit, "gradients")
        assert gradients is not None, "they were asked for"
        verified = verify_gradients(step, plan, gradients, whole, limit)
    except (BudgetError, GradientError):
        raise error from None
    if verified is None:  # there was nothing to compare it with
        raise error
    return replace(plan, verified=verified)


def _fastest_measured_plan(
    step: TrainingStep, profile: Profile, limit: int, verify: VerifyLevel
) -> _MeasuredPlan:
    """Return the fastest of the plan and, while it is late, plans of fewer strategies."""
    best = _measured_plan(step, profile, limit, verify)
    for fewer in _with_fewer_strategies(profile, best[0]):
        plan = best[0]
        late = _seconds(plan) - plan.predicted_time
        if late <= max(_LATE * plan.predicted_time, _NOISE_SECONDS):
            break
        report_progress("another plan")
        try:
            other = _measured_plan(step, fewer, limit, verify)
        except BudgetError:
            continue
        if _seconds(other[0]) < _seconds(plan):
            best = other
    return best


def _seconds(plan: Plan) -> float:
    assert plan.measured_time is not None, "it was measured"
    return plan.measured_time


def _with_fewer_strategies(profile: Profile, plan: Plan) -> Iterator[Profile]:
    """Yield the profile without candidates that offload, then without those that go op by op.

    Each of them only if the plan uses such candidates.
    """
    from rekindle.planner.solve import solver  # noqa: PLC0415

    if plan.offloads:
        yield solver.without_offload(profile)
    if any(isinstance(candidate.strategy, Selective) for _, _, candidate in plan.blocks):
        yield solver.only(profile, lambda each: not isinstance(each.strategy, Selective))


def _measured_plan(
    step: TrainingStep, profile: Profile, limit: int, verify: VerifyLevel
) -> _MeasuredPlan:
    """Solve, and measure a step, until that is within a limit; each time with a lower aim."""
    aim, peak = limit, 0
    for i in range(_TRIES):
        report_progress("solve")
        if i == 0:
            plan = solved(profile, aim)
        else:
            is_last = i == _TRIES - 1
            plan = plan_chosen(profile, aim, partial(_solve_or_smallest, profile, aim, is_last))
        report_progress("verify")
        compares = verify == "gradients" or (
            verify == "auto" and plan.predicted_time <= AFFORDABLE_SECONDS
        )
        measured = _measure_unless_oom(step, plan, profile, with_gradients=compares)
        if measured is None:
            aim = min(aim, plan.predicted_peak)
            aim -= max((aim - profile.static_bytes) // 10, 1)
            peak = limit + 1
            _log.info("the step runs out of memory: planning again for %s", format_bytes(aim))
            continue
        peak, seconds = _worst_of_ranks(measured)
        if peak <= limit:
            return plan.measured(peak, seconds), measured.gradients
        _log.info("the step peaks at %s: planning again", format_bytes(peak))
        aim -= peak - limit + max(limit // 200, 1)
    found = f"measured at {format_bytes(peak)}" if peak > limit + 1 else "out of memory"
    raise raised_on_all_ranks(
        BudgetError(
            f"Plans for {format_bytes(limit)} were {found}, more than was predicted. Try a larger "
            "budget, or free what else is on the device."
        )
    )


def _solve_or_smallest(profile: Profile, aim: int, is_last: bool) -> Solution:
    """Solve within an aim; else take the smallest peak, which may be lower than predicted."""
    from rekindle.planner.solve import solver  # noqa: PLC0415

    solution = None if is_last else solver.choose(profile, aim)
    return solution or solver.least_peak(profile)


def _worst_of_ranks(measured: MeasuredStep) -> tuple[int, float]:
    """Return the highest peak and the longest time of all ranks' steps under one plan."""
    steps = all_gather((measured.peak, measured.seconds))
    return max(peak for peak, _ in steps), max(seconds for _, seconds in steps)


def _measure_unless_oom(
    step: TrainingStep, plan: Plan, profile: Profile, *, with_gradients: bool
) -> MeasuredStep | None:
    """Measure a step under a plan; None if the device runs out of memory.

    Of several ranks, it raises the error: the others would wait for a rank that runs no step.
    """
    try:
        return measure_step(step, plan, profile, with_gradients=with_gradients)
    except torch.OutOfMemoryError:
        if has_other_ranks():
            raise
    if compute_device(step.model).type == "cuda":
        torch.cuda.empty_cache()
    return None
