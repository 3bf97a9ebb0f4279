"""`profile`, `solve`, `frontier` and `fit`."""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import nn

from rekindle._api.planning_checks import (
    check_batch,
    check_compiled,
    check_given_profile,
    check_model,
    check_options,
    check_source_of_times,
    has_spill_candidates,
    is_meta,
    need_scipy,
    refuse_without_memory,
    say_if_in_eval_mode,
)
from rekindle.modules.blocks import Named, named_blocks
from rekindle.planner import fit as fit_model
from rekindle.planner.fake_profile import Like, fake_profile
from rekindle.planner.find_frontier import find_frontier
from rekindle.planner.fit_request import FitRequest, VerifyLevel
from rekindle.planner.frontier import Frontier
from rekindle.planner.loss import checked_loss, warn_without_loss
from rekindle.planner.measure.static_memory import optimizer_bytes, static_bytes
from rekindle.planner.placement import compute_device
from rekindle.planner.plan import Plan
from rekindle.planner.plan_for_budget import (
    BudgetError,
    budget_bytes,
    format_least_inexact,
    refuse_unlikely_budget,
    solved,
    with_nearby,
)
from rekindle.planner.profile_model import measuring_device, profile_model
from rekindle.planner.progress import Progress, show_progress
from rekindle.planner.ranks.rank_sync import (
    all_gather,
    collective,
    has_other_ranks,
    is_first_rank,
    require_same_on_ranks,
)
from rekindle.planner.ranks.worst_case import shape_of_profile, worst_case
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import Profile
from rekindle.report import frontier_text, html, plot, text  # noqa: F401 (values print by them)
from rekindle.report.page import write  # noqa: F401 (they write pages by it)
from rekindle.sizes import parse_bytes

_log = logging.getLogger("rekindle")


def profile(
    model: nn.Module,
    batch: Any,
    *,
    loss: Any = None,
    optimizer: Any = None,
    device: str | torch.device | None = None,
    like: Like = None,
    spill: bool = False,
    max_offload: int | str | None = None,
    blocks: Named | None = None,
    exact: bool = True,
    progress: bool | None = None,
    group: Any = None,
) -> Profile:
    """Measure a model's training step, block by block. The model ends as it was.

    In a distributed run it is a collective call: all ranks of a group make it, and get what was
    measured on the rank with the most. An error on one of them is raised on all.

    With `device="meta"` nothing is measured: the step runs on tensors without memory, and no device
    is needed. The model and the batch may be on any, the meta device too.

    >>> import torch, rekindle
    >>> with torch.device("meta"):
    ...     layer = torch.nn.TransformerEncoderLayer(8192, 64, 28672, batch_first=True)
    ...     model, batch = torch.nn.TransformerEncoder(layer, 4), torch.empty(1, 4096, 8192)
    >>> loss = lambda out: out.square().mean()
    >>> profile = rekindle.profile(model, batch, loss=loss, device="meta", like="H100")
    >>> plan = rekindle.solve(profile, budget="80GiB")
    >>> plan.device
    'H100'

    Args:
        model: the model, on its device.
        batch: what the model is called with: a tensor, a tuple, a dict; or a function without
            arguments that runs a forward and returns the loss.
        loss: the loss, where the model does not return it: a function of the model's output, or of
            the output and the batch (which gets both if it requires two arguments). The output is
            taken to live until the backward has ended.
        optimizer: the optimizer, for the size of its state.
        device: `"meta"`, or nothing for the model's own.
        like: with `device="meta"`, where times come from: a device, such as `"H200"`, or a profile
            of the same model that was measured. If not given, the device that the model is on.
        spill: what a plan sends away goes to disk (the system's folder for temporary files), not
            to host memory; on a CPU, plans send nothing away without it.
        max_offload: bytes that plans send away at most, as an `int` or like `"100GiB"`, from each
            device. None: what the machine has free, but for a tenth of all, shared by its ranks;
            with `device="meta"` there is no bound.
        blocks: the modules that are planned one by one: patterns of paths like `"layers.*"`,
            classes of modules, or several of them, none inside another. None: they are found.
        exact: False also measures strategies that change the last bits of gradients, because they
            add them up in another order: heads without logits, and modules in tiles of tokens.
        progress: whether to show how far it is, once it takes longer than two seconds: a bar on
            stderr (with rich; else lines in the log). None: if stderr is a terminal.
        group: the ranks that run the model together: a process group, or a `DeviceMesh` of one
            dimension. None: all ranks. The ranks of one stage of a pipeline, or one rank alone
            (`torch.distributed.new_group([rank], use_local_synchronization=True)`), go by
            themselves. With `device="meta"` each rank goes by itself.
    """
    if is_meta(device):
        found = _profile(model, batch, loss, optimizer, True, like, spill, blocks, exact, progress)
        return _with_room(found, max_offload)
    with collective("profile", group):
        found = _profile(model, batch, loss, optimizer, False, like, spill, blocks, exact, progress)
        return _with_room(found, max_offload)


def _profile(
    model: nn.Module,
    batch: Any,
    loss: Any,
    optimizer: Any,
    on_meta: bool,
    like: Like,
    spill: bool,
    blocks: Named | None,
    exact: bool,
    progress: bool | None,
) -> Profile:
    check_model(model)
    check_compiled(model, blocks, on_meta)
    check_batch(model, batch)
    check_options(optimizer, spill, exact)
    given = checked_loss(loss, batch)
    check_source_of_times(like, spill, on_meta)
    if not on_meta:
        refuse_without_memory(model)
        require_same_on_ranks(spill=spill, exact=exact, loss="none" if loss is None else "given")
    with show_progress(checked_progress(progress)):
        if on_meta:
            found = fake_profile(model, batch, optimizer, like, given, blocks, exact=exact)
        else:
            measured_on = measuring_device(compute_device(model), spill)
            found = profile_model(model, batch, optimizer, measured_on, given, blocks, exact=exact)
    if found.loss == "none":
        warn_without_loss(found.batch)
    return found


def _with_room(profile: Profile, max_offload: int | str | None) -> Profile:
    """A profile whose plans move no more than was given, if it was; the least of all ranks'."""
    own = None if max_offload is None else parse_bytes(max_offload, "max_offload")
    given = [room for room in all_gather(own) if room is not None]
    return replace(profile, tier_bytes=min(given)) if given else profile


def checked_progress(wanted: Any) -> Progress:
    """Check the `progress=` of a call, and return what shows it: on the first rank alone."""
    if wanted is not None and not isinstance(wanted, bool):
        raise TypeError(f"progress should be a bool or None, but got {type(wanted).__name__}")
    return Progress(wanted if is_first_rank() else False)


def solve(profile: Profile, budget: int | str, *, group: Any = None) -> Plan:
    """Return the plan that keeps the step's peak within a budget at the least time.

    Args:
        profile: what `profile` measured.
        budget: bytes, as an `int` or like `"24GiB"`, for everything on the device; or a share of
            the activations' peak without a plan, like `"40%"`.
        group: ranks that get one plan, for the smallest of their budgets and the worst of their
            profiles: a process group, or a mesh of one dimension, all of whose ranks make the call.
            None: a plan for this rank alone, by nothing but this profile.
    """
    with _collective_with(group, "solve"):
        profile = _worst_profile(profile, "solve")
        return with_nearby(profile, solved(profile, budget_bytes(profile, budget)))


def _collective_with(group: Any, call: str) -> AbstractContextManager[None]:
    """Run a call that ranks make together only if they give a group."""
    return nullcontext() if group is None else collective(call, group)


def _worst_profile(profile: Any, call: str) -> Profile:
    """Check a profile that is given; returns it with the most that those of other ranks have."""
    if not isinstance(profile, Profile):
        raise TypeError(f"{call}() takes a profile, but got {type(profile).__name__}")
    need_scipy()
    profiles = all_gather(profile)
    if any(shape_of_profile(other) != shape_of_profile(profile) for other in profiles):
        raise ValueError(
            "The profiles that ranks were given are not of one measurement: they have other blocks "
            "or candidates. Call rekindle.profile on all ranks of the group at a time."
        )
    return worst_case(profiles, profile)


def frontier(
    profile: Profile, points: int = 8, *, progress: bool | None = None, group: Any = None
) -> Frontier:
    """Return plans from the plain peak down to the smallest that works: time against memory.

    The value is a sequence of points, prints as a table, and plots itself.

    Args:
        profile: what `profile` measured.
        points: how many to look for, at even distances in memory; those that are alike are one.
        progress: as for `profile`.
        group: as for `solve`.
    """
    with _collective_with(group, "frontier"):
        profile = _worst_profile(profile, "frontier")
        if not isinstance(points, int) or isinstance(points, bool) or points < 1:
            raise ValueError(f"points should be a whole number from 1 on, but got {points!r}")
        require_same_on_ranks(points=points)
        with show_progress(checked_progress(progress)):
            return find_frontier(profile, points)


def fit(
    model: nn.Module,
    batch: Any,
    budget: int | str,
    *,
    loss: Any = None,
    optimizer: Any = None,
    profile: Profile | None = None,
    spill: bool = False,
    max_offload: int | str | None = None,
    blocks: Named | None = None,
    exact: bool = True,
    verify: VerifyLevel = "auto",
    progress: bool | None = None,
    group: Any = None,
) -> Plan:
    """Make a training step of a model fit a budget, at the smallest cost in time, in place.

    Profiles, solves, applies, and runs a step to see: a plan that is over the budget is made anew
    with less, and one whose gradients are not those of a step without it is never applied. A model
    that fits as it is is left as it is. When the model is called with more than it was planned for,
    it is planned again, and a log line says so; `plan_of` has the plan that holds.
    `rekindle.remove(model)` undoes it.

    In a distributed run it is a collective call: all ranks of a group make it. The smallest of
    their budgets counts, and what was measured on the rank with the most; all get one plan. An
    error on one of them is raised on all.

    >>> import torch, rekindle
    >>> block = lambda: torch.nn.Sequential(
    ...     torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
    ... )
    >>> model = torch.nn.Sequential(*[block() for _ in range(4)])
    >>> x, y = torch.randn(256, 64), torch.randn(256, 64)
    >>> loss = lambda out: torch.nn.functional.mse_loss(out, y)
    >>> plan = rekindle.fit(model, x, budget="50%", loss=loss)
    >>> plan.measured_peak <= plan.budget
    True
    >>> rekindle.remove(model)

    Args:
        model: the model, on its device.
        batch: as for `profile`: the largest that training will see.
        budget: as for `solve`.
        loss: as for `profile`: without it, a model that returns no loss is planned without one.
        optimizer: the optimizer, for the size of its state.
        profile: what `rekindle.profile` measured of this model and batch, if it has been: then
            another budget takes seconds.
        spill: as for `profile`.
        max_offload: as for `profile`.
        blocks: as for `profile`; not with a profile, which has its blocks.
        exact: as for `profile`: False allows plans that change the last bits of gradients, if
            nothing else fits or they are faster.
        verify: `"gradients"` runs one more step, by other strategies than the plan, to compare the
            gradients with; `"peak"` does not; `"auto"` does if a step is predicted to take less
            than a minute. `plan.verified` says what was found.
        progress: as for `profile`.
        group: as for `profile`: the ranks that plan together.
    """
    with collective("fit", group), show_progress(checked_progress(progress)):
        return _fit(
            model,
            *(batch, budget, loss, optimizer, profile, spill, max_offload, blocks, exact, verify),
        )


def _fit(
    model: nn.Module,
    batch: Any,
    budget: int | str,
    loss: Any,
    optimizer: Any,
    known: Profile | None,
    spill: bool,
    max_offload: int | str | None,
    blocks: Named | None,
    exact: bool,
    verify: VerifyLevel,
) -> Plan:
    need_scipy()
    refuse_unlikely_budget(budget)
    check_options(optimizer, spill, exact)
    if verify not in get_args(VerifyLevel):
        raise ValueError(f'verify should be "auto", "gradients" or "peak", but got {verify!r}')
    given = checked_loss(loss, batch)
    if known is not None:
        if blocks is not None:
            raise ValueError("blocks= is for the profile, which was given: it has its blocks")
        check_given_profile(known, model, batch, given)
        if spill and not has_spill_candidates(known):
            raise ValueError(
                "spill=True, but the profile was measured without it: "
                "rekindle.profile(..., spill=True)"
            )
        if not exact and known.is_exact:
            raise ValueError(
                "exact=False, but the profile was measured without it: "
                "rekindle.profile(..., exact=False)"
            )
    say_if_in_eval_mode(model)
    require_same_on_ranks(verify=verify, profile="none" if known is None else "given")
    measure = partial(
        profile, model, batch, loss=loss, optimizer=optimizer, spill=spill, blocks=blocks
    )
    if known is None:
        measured = measure(exact=exact)
    else:
        if known.loss == "none":
            warn_without_loss(known.batch)
        if optimizer is not None:
            known = _with_optimizer(known, model, batch, optimizer)
        measured = _worst_profile(known, "fit")
    measured = _with_room(measured, max_offload)
    step = TrainingStep(model, batch, given)
    is_outside = given is not None or step.function is not None
    request = FitRequest(
        budget,
        optimizer_bytes=optimizer_bytes(optimizer, compute_device(model)),
        rests=(measured.rest, *measured.rests) if is_outside else (),
        output_held=measured.output_held,
        spill=spill or has_spill_candidates(measured),
        max_offload=None if max_offload is None else measured.tier_bytes,
        loss=given,
        exact=exact and measured.is_exact,
        verify=verify,
        blocks=None if blocks is None else tuple(named_blocks(model, blocks)),
    )
    try:
        return fit_model.fit(step, measured, request)
    except BudgetError as error:
        if known is not None or not exact or has_other_ranks():
            raise
        try:
            found = _with_room(measure(exact=False), max_offload)
            least = format_least_inexact(found, budget_bytes(measured, budget))
        except Exception:  # noqa: BLE001 - it only adds to an error that is raised in any case
            _log.exception("looking for a plan with exact=False failed")
            raise error from None
        raise BudgetError(f"{error} {least}".strip()) from None


def _with_optimizer(profile: Profile, model: nn.Module, batch: Any, optimizer: Any) -> Profile:
    """Return a profile with the optimizer's state counted, which it may have been without."""
    device = compute_device(model)
    counted = static_bytes(model, optimizer, device, TrainingStep(model, batch).batch_tensors())
    return replace(profile, static_bytes=max(profile.static_bytes, counted))
