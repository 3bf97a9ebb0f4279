"""Applies a plan to a model, and watches the model's calls while it trains.

A call with larger inputs than the plan is for has the model fitted again if its budget is known;
else a log line says that a step may peak higher. An out-of-memory error gets a note on the plan.
"""

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import nn

from rekindle.module_attachment import attach, attached
from rekindle.modules.applied import Applied
from rekindle.modules.apply_strategies import apply_strategies
from rekindle.modules.blocks import unwrapped_blocks
from rekindle.modules.caches import forbid_cache
from rekindle.modules.compiled_blocks import compiled_paths
from rekindle.modules.forward import forward_of, install_forward
from rekindle.modules.patterns import is_inside
from rekindle.modules.unwrapping import class_name, places, unwrapped
from rekindle.offload.owners import OffloaderSet, owner_of
from rekindle.planner.fit_request import FitRequest
from rekindle.planner.input_shapes import Shapes, count_elements, format_shapes, input_shapes
from rekindle.planner.instruments.model_lock import planning_lock
from rekindle.planner.nested_tensors import tensors_in
from rekindle.planner.oom_notes import add_plan_note
from rekindle.planner.placement import compute_device
from rekindle.planner.plan import Plan
from rekindle.planner.plan_for_budget import BudgetError
from rekindle.planner.ranks.rank_sync import has_other_ranks
from rekindle.planner.trace.block_calls import without_graph
from rekindle.planner.training_step import ModelCall
from rekindle.regions.base import is_replaying
from rekindle.regions.selective.offload_bridge import end_planned_copy_outs
from rekindle.sizes import format_bytes
from rekindle.strategy import Recompute, Strategy
from rekindle.torch_private.autograd_graph import has_accumulation_hooks
from rekindle.torch_private.cuda import is_capturing
from rekindle.torch_private.fsdp import sharded_parameters
from rekindle.torch_private.func_transforms import func_transform
from rekindle.torch_private.saved_tensor_hooks import top_hooks

_log = logging.getLogger("rekindle")

Refit: TypeAlias = Callable[[nn.Module, ModelCall, FitRequest], Plan]
"""Fits a model to a call, by the request of an earlier `fit`."""


class PlanRuntime:
    """Watches the calls of a model that runs by a plan."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.plan = plan
        self.request: FitRequest | None = None
        """The request of the `fit` that applied the plan; None if it was applied by itself."""
        self.refit: Refit | None = None
        """Fits the model to a larger call; None if the plan was applied by itself."""
        self.is_on = True
        """False while the model is measured."""
        self._device = compute_device(model)
        self._planned_elements = count_elements(plan.inputs)
        self._larger: Shapes = ()
        """The shapes of the last call, if it was larger than planned."""
        self._has_warned = False
        self._threads: set[int] = set()
        """Threads that have called the model."""

    def before_call(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Compare the inputs of a call in training with those that were planned for."""
        if torch.compiler.is_compiling() or not model.training:
            return
        if is_replaying() or not torch.is_grad_enabled():
            return
        with planning_lock(model):  # which another thread may hold, to fit the model again
            runtime = _runtime_on(model)  # none while this thread measures the model
            if runtime is not None:
                runtime._check_shapes(model, args, kwargs)

    def _check_shapes(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Fit the model again, or warn that a step may peak higher, if inputs are larger."""
        self._threads.add(get_ident())
        shapes = input_shapes(args, kwargs)
        self._larger = shapes if count_elements(shapes) > self._planned_elements else ()
        if not self._larger:
            return
        reason = self._why_no_refit(model)
        if reason is None:
            self._fit_to_larger_call(model, args, kwargs, shapes)
        elif not self._has_warned:
            self._has_warned = True
            peak = format_bytes(self.plan.measured_peak or self.plan.predicted_peak)
            _log.warning(
                "%s is called with %s, larger than %s that its plan is for: a step may peak above "
                "%s. It is not planned again: %s",
                *(
                    type(model).__name__,
                    format_shapes(shapes),
                    format_shapes(self.plan.inputs),
                    peak,
                    reason,
                ),
            )

    def _why_no_refit(self, model: nn.Module) -> str | None:
        """Return why the model cannot be fitted again in this call; None if it can."""
        if self.refit is None:
            return "the plan was applied, not fitted"
        if self.plan.compiled:
            return "its blocks are compiled; call rekindle.fit with the larger batch"
        if compiled_paths(model, (path for path, _, _ in self.plan.blocks)):
            return "its blocks are compiled; call rekindle.fit before torch.compile"
        if has_other_ranks():
            return "ranks would have to agree on when; call rekindle.fit on all of them"
        if sharded_parameters(model):
            return "its parameters are sharded, and gathered by now for this call"
        if len(self._threads) > 1:
            return "several threads train it, and another may be in the middle of a step"
        if top_hooks(False) is not None:
            return "it is called inside a region, or under saved-tensor hooks"
        if func_transform() is not None or is_capturing():
            return "it is called inside a transform, or captured as a CUDA graph"
        if any(map(has_accumulation_hooks, model.parameters())):
            return "a parameter has a hook that runs when its gradient is there"
        return None

    def _fit_to_larger_call(self, model: nn.Module, args: Any, kwargs: Any, shapes: Shapes) -> None:
        """Fit the model to a larger call, before that call runs."""
        assert self.refit is not None, "else there is a reason not to"
        assert self.request is not None, "it comes with refit"
        running = forward_of(model)
        planned = format_shapes(self.plan.inputs)
        larger = f"{format_shapes(shapes)}, larger than {planned} that its plan is for"
        try:
            call = ModelCall(*without_graph((args, kwargs)))
            plan = self.refit(model, call, self.request)
        except BudgetError as error:
            raise BudgetError(
                f"{type(model).__name__} is called with {larger}, and there is no plan for that: "
                f"{error}"
            ) from error
        runtime = _runtime_on(model)
        assert runtime is not None, "the plan was applied"
        runtime._threads |= self._threads
        if running is not None:
            # The call in progress already holds the old `Forward`: give it the new strategy.
            now = forward_of(model)
            running.run_by(None if now is None else now.strategy)
            running.is_on = True
        _log.warning(
            "%s is called with %s: planned again. A step peaked at %s, and will at %s now, within "
            "%s",
            type(model).__name__,
            larger,
            format_bytes(self.plan.measured_peak or self.plan.predicted_peak),
            format_bytes(plan.measured_peak or plan.predicted_peak),
            format_bytes(plan.budget),
        )

    def after_call(self, _model: nn.Module, _args: Any, _kwargs: Any, out: Any) -> None:
        """Annotate an out-of-memory error, if a call failed: then it has no output."""
        if torch.compiler.is_compiling() or out is not None:
            return
        error = sys.exc_info()[1]
        if isinstance(error, torch.OutOfMemoryError):
            self.annotate_oom(error)

    def annotate_oom(self, error: torch.OutOfMemoryError) -> None:
        """Add a note on the plan to an error."""
        add_plan_note(error, self.plan, self._device, self._larger)


@dataclass(eq=False)
class _RuntimeOnPart:
    """A plan's runtime on a block of the model, or on a module that has a cache."""

    runtime: PlanRuntime
    is_on: bool = True

    def annotate_oom(self, error: torch.OutOfMemoryError) -> None:
        """Add a note on the plan to an error."""
        self.runtime.annotate_oom(error)


def _finish_copy_outs_before_backward(
    offloaders: OffloaderSet, _block: nn.Module, _args: Any, out: Any
) -> None:
    """Have copy-outs in flight finish when the backward comes to the last block's output.

    A last block that moves nothing itself would not wait for them, and its backward would be on top
    of their memory.
    """
    if torch.compiler.is_compiling() or is_replaying() or func_transform() is not None:
        return
    for tensor in tensors_in(out):
        if tensor.requires_grad:
            tensor.register_hook(lambda _: end_planned_copy_outs(offloaders))


def apply_plan(model: nn.Module, plan: Plan) -> Applied:
    """Apply a plan to a model, after checking that it is for this model; all of it or nothing."""
    strategies = strategies_for(plan, model)
    _refuse_other_code(plan, model)
    compiled = () if plan.keeps_all else plan.compiled
    applied = apply_strategies(
        model, strategies, lambda: _attach_runtime(plan, model), compiled=compiled
    )
    where = planned_paths(model)
    return applied.in_words({where[path]: each.describe() for path, _, each in plan.blocks})


def strategies_for(plan: Plan, model: nn.Module) -> dict[str, Strategy]:
    """Return the strategy of each block by path; an error if the plan is for another model."""
    if plan.model not in (class_name(model), type(model).__name__):
        raise ValueError(f"The plan is for a {plan.model}, but the model is a {class_name(model)}")
    where = planned_paths(model)
    for path, kind, _ in (*plan.blocks, *plan.heads):
        block = model.get_submodule(where[path]) if path in where else None
        found = "nothing" if block is None else class_name(block)
        if block is None or kind not in (found, type(block).__name__):
            raise ValueError(f"The plan has a {kind} at {path!r}, but the model has {found}")
    planned = {path for path, _, _ in plan.blocks} | {*plan.unused, *plan.left_out}
    unplanned = [path for path in unwrapped_blocks(model) if not _is_planned(path, planned)]
    if unplanned:
        raise ValueError(f"The model has a block that the plan has not: {unplanned[0]!r}")
    # A block that the profiled step did not run has no candidates; a step may yet run it. Of all
    # strategies, recompute holds the least.
    skipped = () if plan.keeps_all else (path for path in plan.unused if path in where)
    strategies: dict[str, Strategy] = {where[path]: Recompute() for path in skipped}
    strategies |= {where[path]: candidate.strategy for path, _, candidate in plan.blocks}
    return {**strategies, **{where[path]: strategy for path, _, strategy in plan.heads}}


def _refuse_other_code(plan: Plan, model: nn.Module) -> None:
    """Raise a `ValueError` if a plan for compiled blocks meets others, or the other way round."""
    if plan.keeps_all:
        return
    compiled = set(compiled_paths(model, (path for path, _, _ in plan.blocks)))
    for path, kind, _ in plan.blocks:
        if (path in compiled) == (path in plan.compiled):
            continue
        code = ("compiled code", "code that is not compiled")
        planned, found = code if path in plan.compiled else reversed(code)
        raise ValueError(
            f"The plan is for {kind} at {path!r} as {planned}, but the model has it as {found}. "
            "They save other activations: fit the model as it is now, or apply the plan before "
            "torch.compile if it was made without."
        )


def _is_planned(path: str, planned: Iterable[str]) -> bool:
    """Return whether a module has a plan: for itself, modules inside it, or one around it."""
    return any(p == path or is_inside(p, path) or is_inside(path, p) for p in planned)


def planned_paths(model: nn.Module) -> dict[str, str]:
    """The model's own path of each module, by the path that a plan has for it.

    A plan's paths have no wrappers in them, but in a file of an older rekindle.
    """
    own = {path: path for path, _ in model.named_modules(remove_duplicate=False)}
    return {**own, **places(model)}


def _attach_runtime(plan: Plan, model: nn.Module) -> None:
    """Attach a plan's runtime to a model that runs by it; `rekindle.remove` detaches it."""
    runtime = PlanRuntime(plan, model)
    where = planned_paths(model)
    blocks = {model.get_submodule(where[path]) for path, _, _ in plan.blocks}
    unchanged = {m for block in blocks - {model} for m in block.modules() if plan.keeps_all}
    last = model.get_submodule(where[plan.blocks[-1][0]]) if plan.offloads else None
    for module in model.modules():
        if module in unchanged:
            continue
        handles = [forbid_cache(module)]
        if module is model and plan.inputs:
            handles.append(module.register_forward_pre_hook(runtime.before_call, with_kwargs=True))
        if module is model or (module in blocks and not plan.inputs):
            handles.append(
                module.register_forward_hook(runtime.after_call, with_kwargs=True, always_call=True)
            )
        if module is last:
            finish = partial(_finish_copy_outs_before_backward, owner_of(model))
            handles.append(module.register_forward_hook(finish))
        found = [handle for handle in handles if handle is not None]
        if module is model:
            attach(module, runtime, *found)
        elif found or module in blocks:
            attach(module, _RuntimeOnPart(runtime), *found)


def refit_on_larger_calls(model: nn.Module, request: FitRequest, refit: Refit) -> None:
    """Have a model with a plan fitted again, by `refit`, when it is called with larger inputs."""
    runtime = _runtime_on(model)
    assert runtime is not None, "its plan was applied"
    runtime.request, runtime.refit = request, refit
    where = planned_paths(model)
    if forward_of(model) is None and any(not where[path] for path, _, _ in runtime.plan.blocks):
        # The model is its own block: its forward must be replaceable while a call runs.
        install_forward(model, None, owner_of(model))


def plan_of(model: nn.Module) -> Plan | None:
    """Return the plan that a model runs by: the last one of `fit`, or of `apply`; None without one.

    >>> import torch, rekindle
    >>> model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(8, 2, 16)] * 2)
    >>> loss = lambda out: out.square().mean()
    >>> plan = rekindle.fit(model, torch.randn(4, 2, 8), "1GiB", loss=loss)
    >>> rekindle.plan_of(model) == plan
    True
    >>> rekindle.remove(model)
    >>> rekindle.plan_of(model)

    Args:
        model: the model that `fit` or `apply` was given, also in a wrapper such as DDP's.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan_of() takes a model, but got {type(model).__name__}")
    runtime = _runtime_on(model) or _runtime_on(unwrapped(model))
    return None if runtime is None else runtime.plan


def _runtime_on(model: nn.Module) -> PlanRuntime | None:
    found = attached(model)
    return found if isinstance(found, PlanRuntime) else None
