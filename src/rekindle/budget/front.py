"""The front door: `profile`, `solve`, `frontier`, `fit`."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from rekindle.budget import profiling
from rekindle.budget.agreement import agreed, highest, is_first
from rekindle.budget.devices import Device
from rekindle.budget.fake import has_no_memory
from rekindle.budget.imagining import Like, imagine
from rekindle.budget.memory import bytes_of, metered
from rekindle.budget.plan import Plan
from rekindle.budget.progress import Progress, each, shown, tell
from rekindle.budget.shapes import elements
from rekindle.budget.simulate import simulate
from rekindle.budget.standing import Fitting, keep_fitted, plan_of
from rekindle.budget.static import optimizer_bytes, static_bytes
from rekindle.budget.timing import timed
from rekindle.budget.values import Nearby, Option, Prediction, Profile
from rekindle.errors import RekindleError
from rekindle.modules.application import apply, undo
from rekindle.sizes import format_bytes, parse_bytes

_log = logging.getLogger("rekindle")
_TRIES = 4
_LEARNING = 4
"""Steps after which offload has learnt what it can."""


class BudgetError(RekindleError):
    """No plan keeps a training step within the budget."""


def profile(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Any = None,
    device: str | torch.device | None = None,
    like: Like = None,
    spill: bool = False,
    progress: bool | None = None,
) -> Profile:
    """Measure a model's training step, block by block. The model ends as it was.

    With `device="meta"` nothing is measured: the step runs on tensors without memory, and no device
    is needed. The model and the batch may be on any, the meta device too.

    >>> import torch, rekindle
    >>> with torch.device("meta"):
    ...     layer = torch.nn.TransformerEncoderLayer(8192, 64, 28672, batch_first=True)
    ...     model, batch = torch.nn.TransformerEncoder(layer, 4), torch.empty(1, 4096, 8192)
    >>> profile = rekindle.profile(model, batch, device="meta", like="H100")
    >>> plan = rekindle.solve(profile, budget="80GiB")
    >>> plan.device
    'H100'

    Args:
        model: the model, on its device.
        batch: what the model is called with: a tensor, a tuple, a dict; or a function without
            arguments that runs a forward and returns the loss.
        optimizer: the optimizer, for the size of its state.
        device: `"meta"`, or nothing for the model's own.
        like: with `device="meta"`, where times come from: a device, such as `"H200"`, or a profile
            of the same model that was measured. If not given, the device that the model is on.
        spill: what a plan sends away goes to disk (the system's folder for temporary files), not
            to host memory; on a CPU, plans send nothing away without it.
        progress: whether to show how far it is, once it takes longer than two seconds: a bar on
            stderr (with rich; else lines in the log). None: if stderr is a terminal.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"profile() takes a model, but got {type(model).__name__}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("No parameter of the model requires a gradient: it is not trained")
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters()):
        raise ValueError(
            "A parameter has a hook that runs when its gradient is there, such as an optimizer's: "
            "measuring would run it. Profile the model before such hooks are registered."
        )
    _check_options(optimizer, spill)
    on_meta = _is_meta(device)
    if like is not None and not on_meta:
        raise ValueError('like= is for device="meta": elsewhere, times are measured')
    if like is not None and not isinstance(like, str | Device | Profile):
        raise TypeError(
            f"like should be the name of a device or a profile, but got {type(like).__name__}"
        )
    if spill and on_meta:
        raise ValueError('spill=True is for a real device: with device="meta" no disk is measured')
    _need_scipy()
    if on_meta:
        with shown(_progress(progress)):
            return imagine(model, batch, optimizer, like)
    for name, parameter in model.named_parameters():
        if has_no_memory(parameter):
            raise ValueError(
                f"{name} has no memory: there is nothing to measure. "
                'With device="meta", and like="H200" or such, it is profiled all the same.'
            )
    own = next(model.parameters()).device
    with shown(_progress(progress)):
        return profiling.measure(model, batch, optimizer, profiling.bench_of(own, spill))


def _check_options(optimizer: Any, spill: Any) -> None:
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer should be one, but got {type(optimizer).__name__}")
    if not isinstance(spill, bool):
        raise TypeError(f"spill should be True or False, but got {type(spill).__name__}")


def _progress(wanted: Any) -> Progress:
    if wanted is not None and not isinstance(wanted, bool):
        raise TypeError(f"progress should be a bool or None, but got {type(wanted).__name__}")
    return Progress(wanted if is_first() else False)


def _is_meta(device: Any) -> bool:
    if device is None:
        return False
    if isinstance(device, str | torch.device) and str(device) == "meta":
        return True
    raise ValueError(f'device should be "meta", or nothing to measure, but got {device!r}')


def solve(profile: Profile, budget: int | str) -> Plan:
    """The plan that keeps the step's peak within a budget at the least time.

    Args:
        profile: what `profile` measured.
        budget: bytes, as an `int` or like `"24GiB"`, for everything on the device; or a share of
            the activations' peak without a plan, like `"40%"`.
    """
    if not isinstance(profile, Profile):
        raise TypeError(f"solve() takes a profile, but got {type(profile).__name__}")
    _need_scipy()
    return _with_nearby(profile, _solved(profile, budget_bytes(profile, budget)))


def _solved(profile: Profile, limit: int) -> Plan:
    from rekindle.budget import solving  # noqa: PLC0415

    choice = solving.choose(profile, limit)
    if choice is None:
        least = solving.smallest(profile)
        least_kib = -(-least.prediction.peak // 1024)
        raise BudgetError(
            f"No plan fits into {format_bytes(limit)}. The least that works is {least_kib} KiB, "
            f"of which {format_bytes(profile.static_bytes)} are parameters, gradients, optimizer "
            f"state and the batch; the peak is in {least.prediction.at}."
        )
    return _plan(profile, limit, choice.options, choice.prediction, choice.gap)


def _with_nearby(profile: Profile, plan: Plan) -> Plan:
    """A plan, with what less memory and more would change."""
    from rekindle.budget.nearby import nearby  # noqa: PLC0415

    options = tuple(option for _, _, option in plan.blocks)
    now = Prediction(plan.predicted_peak, plan.predicted_time)
    less, more = nearby(profile, plan.budget, options, now)
    return replace(plan, less=less, more=more)


def _plan(
    profile: Profile, budget: int, options: Sequence[Option], found: Prediction, gap: float
) -> Plan:
    plain = plain_prediction(profile)
    return Plan(
        model=profile.model,
        batch=profile.batch,
        device=profile.device,
        budget=budget,
        predicted_peak=found.peak,
        predicted_time=found.seconds,
        plain_peak=plain.peak,
        plain_time=plain.seconds,
        gap=gap,
        peak_at=found.at,
        blocks=tuple(
            (path, profile.blocks[index].kind, option)
            for (path, index), option in zip(profile.order, options, strict=True)
        ),
        inputs=profile.inputs,
        unused=profile.unused,
    )


def plain_prediction(profile: Profile) -> Prediction:
    """What a step takes without a plan."""
    return simulate(
        profile,
        [
            next(o for o in profile.options(i) if o.fate == "keep")
            for i in range(len(profile.order))
        ],
    )


def budget_bytes(profile: Profile, budget: int | str) -> int:
    """A budget in bytes: as given, or a share of the activations' peak on top of what is static."""
    share = _check_budget(budget)
    if isinstance(share, float):
        activations = plain_prediction(profile).peak - profile.static_bytes
        return profile.static_bytes + int(share * activations)
    return share


def _check_budget(budget: Any) -> int | float:
    """A budget as bytes, or as a share."""
    if isinstance(budget, str) and budget.strip().endswith("%"):
        try:
            share = float(budget.strip()[:-1]) / 100
        except ValueError:
            raise ValueError(f'A budget as a share is like "40%", but got {budget!r}') from None
        if not 0 < share < 100:
            raise ValueError(
                f"A budget as a share is above 0% and below 10000%, but got {budget!r}"
            )
        return share
    nbytes = parse_bytes(budget, "budget")
    if nbytes <= 0:
        raise ValueError(f"A budget is a number of bytes above 0, but got {budget!r}")
    return nbytes


@dataclass(frozen=True)
class Point:
    """One point of the curve of time against memory."""

    peak: int
    seconds: float
    plan: Plan


def frontier(profile: Profile, points: int = 8, *, progress: bool | None = None) -> list[Point]:
    """Plans from the plain peak down to the least that works: what less memory costs in time.

    Args:
        profile: what `profile` measured.
        points: how many to look for, at even distances in memory; those that are alike are one.
        progress: as for `profile`.
    """
    if not isinstance(profile, Profile):
        raise TypeError(f"frontier() takes a profile, but got {type(profile).__name__}")
    if not isinstance(points, int) or isinstance(points, bool) or points < 1:
        raise ValueError(f"points should be a whole number from 1 on, but got {points!r}")
    _need_scipy()
    with shown(_progress(progress)):
        return _frontier(profile, points)


def _frontier(profile: Profile, points: int) -> list[Point]:
    from rekindle.budget import solving  # noqa: PLC0415

    tell("the least that works")
    highest, least = plain_prediction(profile).peak, solving.smallest(profile).prediction.peak
    found: list[Point] = []
    for i in each(range(points), "point"):
        budget = highest - (highest - least) * i // max(points - 1, 1)
        plan = _solved(profile, max(budget, least))
        if not found or plan.predicted_peak < found[-1].peak:
            found.append(Point(plan.predicted_peak, plan.predicted_time, plan))
    found = [
        point
        for i, point in enumerate(found)
        if all(point.seconds <= less.seconds for less in found[i + 1 :])
    ]
    near = [None, *(Nearby(point.peak, point.seconds) for point in found), None]
    return [
        replace(point, plan=replace(point.plan, more=more, less=less))
        for point, more, less in zip(found, near, near[2:], strict=False)
    ]


def fit(
    model: nn.Module,
    batch: Any,
    budget: int | str,
    *,
    optimizer: Any = None,
    profile: Profile | None = None,
    spill: bool = False,
    progress: bool | None = None,
) -> Plan:
    """Make a training step of a model fit a budget, at the smallest cost in time, in place.

    Profiles, solves, applies, and runs a step to see: a plan that is over the budget is made anew
    with less. Gradients stay what they were, bit for bit. When the model is called with more than
    it was planned for, it is planned again, and a log line says so; `plan_of` has the plan that
    holds. `rekindle.remove(model)` undoes it. In a distributed run all ranks call it, and get the
    plan of the first.

    >>> import torch, rekindle
    >>> block = lambda: torch.nn.Sequential(
    ...     torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
    ... )
    >>> model = torch.nn.Sequential(*[block() for _ in range(4)])
    >>> plan = rekindle.fit(model, torch.randn(256, 64), budget="50%")
    >>> plan.measured_peak <= plan.budget
    True
    >>> rekindle.remove(model)

    Args:
        model: the model, on its device.
        batch: as for `profile`: the largest that training will see.
        budget: as for `solve`.
        optimizer: the optimizer, for the size of its state.
        profile: what `rekindle.profile` measured of this model and batch, if it has been: then
            another budget takes seconds.
        spill: as for `profile`.
        progress: as for `profile`.
    """
    _check_budget(budget)
    _check_options(optimizer, spill)
    if profile is not None:
        _check_measured(profile, model, batch)
        if spill and not _spills(profile):
            raise ValueError(
                "spill=True, but the profile was measured without it: "
                "rekindle.profile(..., spill=True)"
            )
    with shown(_progress(progress)):
        return _fit(model, batch, budget, optimizer, profile, spill)


def _fit(
    model: nn.Module,
    batch: Any,
    budget: int | str,
    optimizer: Any,
    known: Profile | None,
    spill: bool,
) -> Plan:
    if known is None:
        known = profile(model, batch, optimizer=optimizer, spill=spill)
    elif optimizer is not None:
        known = _with_state(known, model, batch, optimizer)
    measured = agreed(known)
    plan = _fitted(model, batch, budget, measured)
    apply(model, plan)
    state = 0 if optimizer is None else optimizer_bytes(optimizer)
    is_function = profiling.Step(model, batch).function is not None
    rest = measured.rest_peak if is_function else 0
    keep_fitted(model, Fitting(budget, state, rest, spill=spill or _spills(measured)))
    return plan


def _with_state(profile: Profile, model: nn.Module, batch: Any, optimizer: Any) -> Profile:
    """A profile that may have been measured without the optimizer, with its state counted."""
    gradients = bytes_of([p.grad for p in model.parameters() if p.grad is not None])
    device = next(model.parameters()).device
    tensors = profiling.Step(model, batch).tensors()
    counted = static_bytes(model, optimizer, device, tensors, gradients)
    return replace(profile, static_bytes=max(profile.static_bytes, counted))


def _check_measured(profile: Any, model: nn.Module, batch: Any) -> None:
    """A profile that is given is one of this model and batch."""
    if not isinstance(profile, Profile):
        raise TypeError(f"profile should be a Profile, but got {type(profile).__name__}")
    if profile.model != type(model).__name__:
        raise ValueError(
            f"The profile is of a {profile.model}, but the model is a {type(model).__name__}"
        )
    shapes = profiling.Step(model, batch).shapes()
    if profile.batch != shapes:
        raise ValueError(f"The profile is of a batch {profile.batch}, but the batch is {shapes}")


def _spills(profile: Profile) -> bool:
    """Whether it was measured with disk for what is sent away."""
    return any(option.tier == "disk" for block in profile.blocks for option in block.options)


def fit_again(model: nn.Module, call: profiling.Call, fitting: Fitting) -> Plan:
    """Fit a model that was fitted before, to a larger call of it."""
    bench = profiling.bench_of(next(model.parameters()).device, fitting.spill)
    measured = profiling.measure(model, call, fitting.optimizer_bytes, bench)
    before = plan_of(model)
    if before is not None:  # what a function does with the result is not seen: taken to grow too
        rest = fitting.rest_peak * elements(measured.inputs) // max(elements(before.inputs), 1)
        measured = replace(measured, rest_peak=max(measured.rest_peak, rest))
        fitting = replace(fitting, rest_peak=rest)
    plan = _fitted(model, call, fitting.budget, measured)
    apply(model, plan)
    keep_fitted(model, fitting)
    return plan


def _fitted(model: nn.Module, batch: Any, budget: int | str, measured: Profile) -> Plan:
    """The plan for a budget that was tried out; the model ends as it was."""
    limit = budget_bytes(measured, budget)
    plan = fastest_within(model, batch, limit, measured)
    return _for_budget(_with_nearby(measured, plan), limit)


def fastest_within(model: nn.Module, batch: Any, limit: int, measured: Profile) -> Plan:
    """A plan that was measured to be within a limit, and fast.

    A step that takes longer than was predicted is compared with plans of fewer means: without
    offload, then without going op by op. What is measured decides.
    """
    plan = _verified(model, batch, limit, measured)
    for profile in _with_fewer_means(measured, plan):
        assert plan.measured_time is not None, "it was tried out"
        late = agreed(plan.measured_time) - plan.predicted_time
        if late <= max(_LATE * plan.predicted_time, _HARDLY):
            break
        tell("another plan")
        try:
            other = _verified(model, batch, limit, profile)
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


def _verified(model: nn.Module, batch: Any, limit: int, measured: Profile) -> Plan:
    """A plan that was tried out, and found to stay within a limit."""
    from rekindle.budget import solving  # noqa: PLC0415

    aim, peak = limit, 0
    for i in range(_TRIES):
        tell("solve")
        if i == 0:
            plan = _solved(measured, aim)
        else:
            choice = solving.choose(measured, aim) if i < _TRIES - 1 else None
            choice = choice or solving.smallest(measured)  # which may take less than predicted
            plan = _plan(measured, aim, choice.options, choice.prediction, choice.gap)
        tell("verify")
        peak, seconds = try_out(model, batch, plan, measured)
        peak = highest(peak, next(model.parameters()).device)
        if peak <= limit:
            return plan.measured(peak, seconds)
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


def try_out(model: nn.Module, batch: Any, plan: Plan, measured: Profile) -> tuple[int, float]:
    """The peak and the time of a step under a plan; the model ends as it was, without the plan."""
    device = next(model.parameters()).device
    step = profiling.Step(model, batch)
    with profiling.untouched(model), step.leaving_no_gradients():
        apply(model, plan)
        for _ in range(_LEARNING if plan.offloads else 1):
            step()
        known = [*model.parameters(), *model.buffers()]
        known += [p.grad for p in model.parameters() if p.grad is not None]
        known += step.tensors()
        with metered(device, known) as meter:
            meter.reset()
            step()
            metered_seconds = timed(step, device) if device.type == "cuda" else None
            peak = meter.peak()  # of several steps, where metering costs nothing
        seconds = timed(step, device) if metered_seconds is None else metered_seconds
        undo(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return measured.static_bytes + peak, seconds


def _need_scipy() -> None:
    if find_spec("scipy") is None:
        raise ImportError(
            "rekindle plans with HiGHS, which comes with scipy: pip install 'rekindle[budget]'"
        )
