"""Solves for a budget until a measured step agrees: its peak, its time, and its gradients.

A step that peaks higher than the budget is solved again with a lower aim. Others are compared with
rivals, by what is measured: Note [The measured floor]. A plan whose gradients are wrong gives way
to one of whole blocks, too.

Note [The measured floor]. Predictions have errors, so a plan has to be faster than its rivals when
both are measured. A plan that keeps or recomputes whole blocks is what a user would write without a
planner, and the step with every block recomputed was measured anyway. So these two are measured as
plans unless they cannot be faster than the plan: the first even if what is predicted of it is too
long by a twentieth more than what was predicted of the plan; the second by the time that it took
while profiling. Plans without offload, and without going op by op, are rivals of a plan that took
longer than predicted. A plan that loses to a rival which should be slower is timed once more: it
may have met a slow moment.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from rekindle.planner.caller_warnings import warn_at_caller
from rekindle.planner.fit_request import VerifyLevel
from rekindle.planner.gradient_fingerprints import GradientFingerprints
from rekindle.planner.measure.measure_step import MeasuredStep, measure_step
from rekindle.planner.placement import compute_device
from rekindle.planner.plan import Plan
from rekindle.planner.plan_for_budget import (
    BudgetError,
    format_too_large,
    plain_candidates,
    plain_prediction,
    plan_by,
    plan_chosen,
    recompute_all,
    solved,
)
from rekindle.planner.progress import report_progress
from rekindle.planner.ranks.rank_sync import all_gather, has_other_ranks, raised_on_all_ranks
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import Candidate, Prediction, Profile, Solution
from rekindle.planner.verify import GradientError, verify_gradients
from rekindle.sizes import format_bytes
from rekindle.strategy import Keep, Recompute, Selective

_log = logging.getLogger("rekindle")
_TRIES = 4
AFFORDABLE_SECONDS = 60.0
"""With `verify="auto"`: the longest predicted step of which the gradients are compared."""
_NOISE = 0.02
"""Share of a step's time that says nothing: another run would take more, or less."""
_NOISE_SECONDS = 0.002
"""Seconds that say nothing, however short a step is."""
_DOUBT = 0.05
"""Share of its time by which a plan of whole blocks may be faster than predicted, if another plan
took what was predicted of it."""
_OFFLOAD_GAIN = 0.02
"""Share of a step's time that offload has to save: it takes host memory, and the link is less
steady than the device."""
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
        is_whole = all(candidate.strategy in _WHOLE_BLOCKS for _, _, candidate in plan.blocks)
        if is_whole and not plan.heads:
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
    """Return the fastest plan that keeps or recomputes whole blocks; raise `error` without one.

    Heads run as without a plan.
    """
    whole = replace(_whole_blocks(profile), rests=())
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
    """Return the fastest of the plan and its rivals. Note [The measured floor]."""
    best = _first_measured_plan(step, profile, limit, verify)
    tried = [_identity(best[0])]
    for rival in _rivals(profile, limit, best[0]):
        if _identity(rival.plan) in tried or _is_as_fast_as(best[0], rival.least_seconds):
            continue
        report_progress("another plan")
        try:
            other = _measured_plan(step, rival.profile, rival.plan, limit, verify)
        except BudgetError:
            continue
        tried.append(_identity(other[0]))
        if _seconds(other[0]) < _seconds(best[0]):
            best = _faster(step, profile, limit, best, other)
    return best


class _Rival(NamedTuple):
    """A plan that may turn out to be faster than one that was measured."""

    profile: Profile
    """The profile that it is by, from which another one is solved for if its peak is too high."""
    plan: Plan
    least_seconds: float
    """The shortest time that it may take."""


def _rivals(profile: Profile, limit: int, plan: Plan) -> Iterator[_Rival]:
    """Yield the rivals of a measured plan. Note [The measured floor]."""
    strategies = [candidate.strategy for _, _, candidate in plan.blocks]
    is_late = not _is_as_fast_as(plan, plan.predicted_time)
    fewer: list[tuple[Profile, float]] = []
    if is_late and plan.heads:
        fewer.append((replace(profile, rests=()), 1.0))
    if is_late and plan.offloads:
        fewer.append((_without_offload(profile), 1.0))
    if is_late and any(isinstance(strategy, Selective) for strategy in strategies):
        fewer.append((_only(profile, lambda each: not isinstance(each.strategy, Selective)), 1.0))
    if any(strategy not in _WHOLE_BLOCKS for strategy in strategies):
        as_predicted = _seconds(plan) / max(plan.predicted_time, 1e-9)
        fewer.append((_whole_blocks(profile), (1 - _DOUBT) * min(as_predicted, 1.0)))
    for each, share in fewer:
        other = _solved_if_any(each, limit)
        if other is not None:
            yield _Rival(each, other, share * other.predicted_time)
    whole = recompute_all(profile, limit)
    if whole is not None:
        other = plan_chosen(profile, limit, lambda: whole)
        yield _Rival(profile, other, other.predicted_time)


def _faster(
    step: TrainingStep, profile: Profile, limit: int, best: _MeasuredPlan, other: _MeasuredPlan
) -> _MeasuredPlan:
    """Return the other plan, or the one that lost to it if this is faster when timed once more.

    It is timed once more if it was predicted to be faster than the other was measured.
    """
    plan, gradients = best
    if plan.predicted_time >= _seconds(other[0]):
        return other
    report_progress("verify")
    again = _measure_unless_oom(step, plan, profile, with_gradients=False)
    if again is None:
        return other
    peak, seconds = _worst_of_ranks(again)
    if peak > limit or seconds >= _seconds(other[0]):
        return other
    return plan.measured(max(peak, plan.measured_peak or 0), seconds), gradients


def _first_measured_plan(
    step: TrainingStep, profile: Profile, limit: int, verify: VerifyLevel
) -> _MeasuredPlan:
    """Return the plan of all strategies, or of all but offload, if that is hardly slower or fails.

    Where steps with offload peak above the limit, and take longer than one without it should,
    another plan with offload, and a lower aim, would take longer still.
    """
    report_progress("solve")
    plan, still = solved(profile, limit), _without_offload(profile)
    without = _solved_if_any(still, limit) if plan.offloads else None
    if without is None:
        return _measured_plan(step, profile, plan, limit, verify)
    seconds = without.predicted_time
    if plan.predicted_time <= (1 - _OFFLOAD_GAIN) * seconds:
        try:
            return _measured_plan(step, profile, plan, limit, verify, give_up_after=seconds)
        except BudgetError:
            report_progress("another plan")
    return _measured_plan(step, still, without, limit, verify)


def _solved_if_any(profile: Profile, limit: int) -> Plan | None:
    """Return the plan for a limit; None if nothing fits."""
    try:
        return solved(profile, limit)
    except BudgetError:
        return None


def _is_as_fast_as(plan: Plan, seconds: float) -> bool:
    """Return whether a plan's measured step takes no longer, beyond doubt, than some seconds."""
    return _seconds(plan) <= seconds + max(_NOISE * seconds, _NOISE_SECONDS)


def _seconds(plan: Plan) -> float:
    assert plan.measured_time is not None, "it was measured"
    return plan.measured_time


def _whole_blocks(profile: Profile) -> Profile:
    """Return the profile with the candidates that keep or recompute a whole block."""
    return _only(profile, lambda candidate: candidate.strategy in _WHOLE_BLOCKS)


def _identity(plan: Plan) -> tuple[Any, ...]:
    """The strategies of a plan: two plans with the same ones are one."""
    return plan.blocks, plan.heads


def _without_offload(profile: Profile) -> Profile:
    """Return the profile with the candidates that move nothing."""
    return _only(profile, lambda candidate: not candidate.bytes_moved)


def _only(profile: Profile, is_meant: Callable[[Candidate], bool]) -> Profile:
    from rekindle.planner.solve import solver  # noqa: PLC0415

    return solver.only(profile, is_meant)


def _measured_plan(
    step: TrainingStep,
    profile: Profile,
    plan: Plan,
    limit: int,
    verify: VerifyLevel,
    give_up_after: float = float("inf"),
) -> _MeasuredPlan:
    """Measure a step by a plan, and solve again until one is within a limit; with lower aims.

    Raises a `BudgetError` if that takes too many tries, or a step above the limit took longer
    than `give_up_after`.
    """
    aim = limit
    leanest: Prediction | None = None
    for i in range(_TRIES):
        if i:
            report_progress("solve")
            choose = _measured_or_smallest if i == _TRIES - 1 else _solve_or_smallest
            plan = plan_chosen(profile, aim, partial(choose, profile, aim, limit))
        report_progress("verify")
        compares = verify == "gradients" or (
            verify == "auto" and plan.predicted_time <= AFFORDABLE_SECONDS
        )
        measured = _measure_unless_oom(step, plan, profile, with_gradients=compares)
        if measured is None:
            aim = min(aim, plan.predicted_peak)
            aim -= max((aim - profile.static_bytes) // 10, 1)
            _log.info(
                "a step under the plan runs out of memory: planning again, for %s in place of %s",
                *(format_bytes(aim), format_bytes(limit)),
            )
            continue
        peak, seconds = _worst_of_ranks(measured)
        if peak <= limit:
            return plan.measured(peak, seconds), measured.gradients
        if leanest is None or peak < leanest.peak:
            leanest = Prediction(peak, seconds, plan.peak_at)
        if seconds > give_up_after:
            break
        aim -= peak - limit + max(limit // 200, 1)
        _log.info(
            "a step under the plan peaks at %s, above the budget of %s: planning again, for %s",
            *(format_bytes(peak), format_bytes(limit), format_bytes(aim)),
        )
    if leanest is not None:
        text = format_too_large(profile, limit, leanest, "The leanest one was measured to take")
    else:
        text = (
            f"Steps under plans for {format_bytes(limit)} ran out of memory: they take more than "
            "was predicted. Try a smaller budget, or free what else is on the device."
        )
    raise raised_on_all_ranks(BudgetError(text))


def _solve_or_smallest(profile: Profile, aim: int, limit: int) -> Solution:
    """Solve within an aim; else take what is surest to be within the limit."""
    from rekindle.planner.solve import solver  # noqa: PLC0415

    return solver.choose(profile, aim) or _measured_or_smallest(profile, aim, limit)


def _measured_or_smallest(profile: Profile, _aim: int, limit: int) -> Solution:
    """Take the step with every block recomputed, if it was measured to be within the limit.

    Else take the smallest predicted peak, which may be lower than predicted.
    """
    from rekindle.planner.solve import solver  # noqa: PLC0415

    return recompute_all(profile, limit) or solver.least_peak(profile)


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
