"""`assert_peak`: the peak of a training step, exactly and without a device."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from rekindle._api.explaining import explain
from rekindle._api.planning import profile, solve
from rekindle._api.planning_checks import check_compiled, check_model, check_options, need_scipy
from rekindle.errors import RekindleError
from rekindle.explanation.step_as_it_is import step_as_it_is
from rekindle.explanation.types import Change, Explanation
from rekindle.modules.forward import forward_of
from rekindle.planner.devices import Device, device_named
from rekindle.planner.loss import checked_loss, warn_without_loss
from rekindle.planner.plan import Plan
from rekindle.planner.plan_for_budget import BudgetError
from rekindle.planner.runtime import plan_of, strategies_for
from rekindle.report.excess_text import format_excess
from rekindle.sizes import parse_bytes


def assert_peak(
    model: nn.Module,
    batch: Any,
    limit: int | str,
    *,
    loss: Any = None,
    optimizer: Any = None,
    like: str | Device = "H100",
    plan: Plan | Literal["fit"] | None = None,
) -> int:
    """Assert that a training step peaks within a limit; return the bytes that it peaks at.

    For tests: a change that raises memory fails, on any machine. The step runs on fake tensors, so
    no device is needed, nothing is allocated, and every run counts the same bytes. The model and
    the batch may be on the meta device; the model ends as it was. The error says by how much the
    step is above the limit, which lines and tensors hold most, and what would help.

    >>> import torch
    >>> from rekindle.testing import assert_peak
    >>> with torch.device("meta"):
    ...     layers = [torch.nn.Linear(1024, 1024), torch.nn.GELU()] * 4
    ...     model, batch = torch.nn.Sequential(*layers), torch.empty(4096, 1024)
    >>> loss = lambda out: out.square().mean()
    >>> assert_peak(model, batch, "250MiB", loss=loss) // 2**20
    216
    >>> assert_peak(model, batch, "100MiB", loss=loss)
    Traceback (most recent call last):
    AssertionError: The training step of Sequential as on H100 peaks at ... MiB (... bytes): ...

    Args:
        model: the model, on any device. Strategies that are applied to it are part of the step, as
            are regions that it runs itself, by `checkpoint` of rekindle or torch.
        batch: as for `rekindle.profile`.
        limit: bytes of everything on the device, as an `int` or like `"24GiB"`.
        loss: as for `rekindle.profile`.
        optimizer: the optimizer, for the size of its state.
        like: the device whose kernels are counted: one for `"cpu"`, the same for all GPUs.
        plan: a plan that stands for what is applied; or `"fit"`: the step under the plan that
            `rekindle.fit` would choose for the limit. None: the step as it is.
    """
    __tracebackhide__ = True
    allowed = parse_bytes(limit, "limit")
    call = StepCall(model, batch, loss, optimizer, like)
    if plan == "fit":
        return _fitted_peak(call, allowed)
    found = measure_step(call, plan)
    if found.peak > allowed:
        raise AssertionError(describe_excess(found, allowed, call, plan))
    return found.peak


@dataclass(frozen=True)
class StepCall:
    """The arguments that describe a training step."""

    model: nn.Module
    batch: Any
    loss: Any = None
    optimizer: Any = None
    like: str | Device = "H100"


def measure_step(call: StepCall, plan: Plan | None = None) -> Explanation:
    """Return an account of a step under a plan, or as it is."""
    check_model(call.model)
    check_compiled(call.model, None, on_meta=True)
    check_options(call.optimizer, False)
    if not isinstance(call.like, str | Device):
        raise TypeError(f"like should be the name of a device, but got {type(call.like).__name__}")
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f'plan should be a Plan, "fit" or None, but got {plan!r}')
    device = device_named(call.like) if isinstance(call.like, str) else call.like
    active = plan_of(call.model) if plan is None else plan
    if active is not None and active.offloads:
        raise ValueError(
            "The plan offloads: how much is on the device at the peak depends on the link, so "
            'there is no exact number. plan="fit" asserts that a plan for the limit exists.'
        )
    strategies = None if plan is None else strategies_for(plan, call.model)
    loss = checked_loss(call.loss, call.batch)
    found = step_as_it_is(call.model, call.batch, loss, call.optimizer, device, strategies)
    if found.loss == "none":
        warn_without_loss(found.batch)
    return found


def describe_excess(
    found: Explanation, limit: int, call: StepCall, plan: Plan | None = None, name: str = "limit"
) -> str:
    """The text of the error of a step that peaks above a limit."""
    managed = any(forward_of(module) is not None for module in call.model.modules())
    changes = () if managed or plan is not None else _changes(call)
    return format_excess(found, limit, name, changes)


def _changes(call: StepCall) -> tuple[Change, ...]:
    """Changes that would help, as far as the step can be profiled."""
    try:
        return explain(
            call.model,
            call.batch,
            loss=call.loss,
            optimizer=call.optimizer,
            device="meta",
            like=call.like,
            progress=False,
        ).changes
    except (RekindleError, ValueError):
        return ()


def _fitted_peak(call: StepCall, limit: int) -> int:
    """The predicted peak under the plan that fits a limit."""
    __tracebackhide__ = True
    need_scipy()
    found = profile(
        call.model,
        call.batch,
        loss=call.loss,
        optimizer=call.optimizer,
        device="meta",
        like=call.like,
        progress=False,
    )
    try:
        return solve(found, limit).predicted_peak
    except BudgetError as error:
        step = f"The training step of {found.model} as on {found.device}"
        raise AssertionError(f"{step}: {error}") from None
