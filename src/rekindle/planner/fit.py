"""Fits a profiled model to a budget: solve → verify → apply.

```
fit(step, profile, request)
    find_plan      Profile ─solve─▶ Plan ─verify─▶ Plan     verified_plan.py
    apply_plan     Plan ─apply─▶ the same model             runtime.py
    refit          profiles and fits again, when the model is called with larger inputs
```
"""

from dataclasses import replace
from functools import partial

from torch import nn

from rekindle.planner.fit_request import FitRequest, VerifyLevel
from rekindle.planner.input_shapes import count_elements
from rekindle.planner.placement import compute_device
from rekindle.planner.plan import Plan
from rekindle.planner.plan_for_budget import budget_bytes, plain_prediction, with_nearby
from rekindle.planner.profile_model import measuring_device, profile_model
from rekindle.planner.runtime import apply_plan, plan_of, refit_on_larger_calls
from rekindle.planner.training_step import ModelCall, TrainingStep
from rekindle.planner.types import Profile
from rekindle.planner.verified_plan import fastest_verified_plan, measured_plain_plan


def fit(step: TrainingStep, profile: Profile, request: FitRequest) -> Plan:
    """Find a plan for a profiled step that keeps it within the budget, and apply it."""
    plan = find_plan(step, profile, request.budget, request.verify)
    apply_plan(step.model, plan)
    refit_on_larger_calls(step.model, request, refit)
    return plan


def find_plan(step: TrainingStep, profile: Profile, budget: int | str, verify: VerifyLevel) -> Plan:
    """Return a fast plan, measured to be within the budget; the model ends as it was.

    A model that fits as it is gets a plan that keeps all, and changes none of its blocks.
    """
    limit = budget_bytes(profile, budget)
    plain = measured_plain_plan(step, profile, limit)
    if plain is not None and plain.measured_peak is not None and plain.measured_peak <= limit:
        plan = plain
    else:
        plan = fastest_verified_plan(step, profile, limit, verify)
        if plain is not None:
            plan = replace(plan, plain_peak=plain.plain_peak, plain_time=plain.plain_time)
    return replace(_for_budget(with_nearby(profile, plan), limit), profile=profile)


def _for_budget(plan: Plan, limit: int) -> Plan:
    """Return a plan with the budget that was asked for; it may be solved for less memory."""
    less, more = (
        near and replace(near, budget=near.budget + limit - plan.budget)
        for near in (plan.less, plan.more)
    )
    return replace(plan, budget=limit, less=less, more=more)


def refit(model: nn.Module, call: ModelCall, request: FitRequest) -> Plan:
    """Fit a model that was fitted before, to a larger call of it."""
    profile = _profile_again(model, call, request)
    if profile.loss != "given":
        request = replace(request, loss=None)
        before = plan_of(model)
        if before is not None:  # parts outside the model are not measured: assume that they grow
            larger = count_elements(profile.inputs), max(count_elements(before.inputs), 1)
            request = request.scaled(*larger)
            profile = _with_rests_of(request, profile)
    step = TrainingStep(model, call, request.loss)
    plan = find_plan(step, profile, request.budget, request.verify)
    if profile.loss != "given" and request.rests:  # a measured step lacks them as well
        plan = replace(plan, plain_peak=max(plan.plain_peak, plain_prediction(profile).peak))
    apply_plan(model, plan)
    refit_on_larger_calls(model, request, refit)
    return plan


def _with_rests_of(request: FitRequest, profile: Profile) -> Profile:
    """Return a profile of the model alone, with the memory of what was around it in a fitted step.

    The time of that is not known, but for the difference between the ways to run the heads.
    """
    if not request.rests:
        return replace(profile, output_held=request.output_held)
    plain, measured = request.rests[0], profile.rest
    found = [
        replace(
            measured,
            heads=rest.heads,
            rest_peak=max(measured.rest_peak, rest.rest_peak) if rest is plain else rest.rest_peak,
            rest_seconds=max(measured.rest_seconds + rest.rest_seconds - plain.rest_seconds, 0.0),
            output_held=rest.output_held,
            recompute_peak=measured.recompute_peak if rest is plain else None,
        )
        for rest in request.rests
    ]
    return profile.with_rests(*found)


def _profile_again(model: nn.Module, call: ModelCall, request: FitRequest) -> Profile:
    """Profile a larger call; without the loss that was given, if that fails on the call.

    The loss may know the labels of the first batch alone: `lambda out: criterion(out, labels)`.
    """
    measured_on = measuring_device(compute_device(model), request.spill)
    if request.max_offload is not None:
        measured_on = replace(measured_on, tier_bytes=request.max_offload)
    measure = partial(
        profile_model, model, call, request.optimizer_bytes, measured_on, exact=request.exact
    )
    if request.loss is not None:
        try:
            return measure(request.loss, request.blocks)
        except Exception:
            if not request.loss.failed:
                raise
    return measure(blocks=request.blocks)
