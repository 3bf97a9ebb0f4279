"""A plan that stands on a model while it trains: it is checked against the model, and applied.

It sees what the model is called with: a call with more than was planned for is planned anew where
the budget is known, and said in a log line where it is not. And it adds what was foreseen to an
error of memory.
"""

import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rekindle.module_attachment import attach, attached
from rekindle.modules.apply_strategies import Applied, What, apply
from rekindle.modules.blocks import unwrapped_blocks
from rekindle.modules.caches import forbid_cache
from rekindle.modules.forward import forward_of, put
from rekindle.modules.unwrapping import class_name, places, unwrapped
from rekindle.planner.candidate_to_strategy import what_of
from rekindle.planner.compiled_modules import compiled_around
from rekindle.planner.input_shapes import (
    Shapes,
    count_elements,
    format_shapes,
    input_shapes,
)
from rekindle.planner.loss import Loss
from rekindle.planner.measure.model_lock import planning_lock
from rekindle.planner.placement import compute_device
from rekindle.planner.plan import Plan
from rekindle.planner.ranks.rank_sync import has_other_ranks
from rekindle.regions.base import is_replaying
from rekindle.regions.selective.offload_bridge import begin_backward
from rekindle.sizes import format_bytes, parse_bytes
from rekindle.torch_private.autograd_graph import has_accumulation_hooks
from rekindle.torch_private.cuda import capturing
from rekindle.torch_private.data_parallel import sharded_parameters
from rekindle.torch_private.func_transforms import func_transform
from rekindle.torch_private.pytrees import tree_leaves, tree_map
from rekindle.torch_private.saved_tensor_hooks import top_hooks

_log = logging.getLogger("rekindle")

Verify = Literal["auto", "gradients", "peak"]
"""What `fit` verifies of a plan: its peak alone; its gradients too; or those if that is cheap."""


@dataclass(frozen=True)
class Fitting:
    """What `fit` was asked for, so that it can be done again."""

    budget: int | str
    optimizer_bytes: int
    rest_peak: int
    """What the head and a loss outside the model take; 0 if the model is the step."""
    output_held: int = 0
    """Bytes of the output that stay until the backward has ended."""
    spill: bool = False
    """Whether what is sent away goes to disk."""
    loss: Loss | None = None
    """The loss that was given."""
    verify: Verify = "auto"
    """What of a plan is verified."""

    def grown(self, elements: int, before: int) -> "Fitting":
        """The same for a larger call, if what is outside the model grows as the inputs do."""
        return replace(
            self,
            rest_peak=self.rest_peak * elements // before,
            output_held=self.output_held * elements // before,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without the loss, which may be any function: a pickle of the model goes without it."""
        return {**vars(self), "loss": None}

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Fitting":
        return self


class Standing:
    """A plan on a model."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.plan = plan
        self.fitting: Fitting | None = None
        self.is_on = True
        self._device = compute_device(model)
        self._room = count_elements(plan.inputs)
        self._larger: Shapes = ()
        """The shapes of the last call, if it was larger."""
        self._has_said = False
        self._threads: set[int] = set()
        """The threads that have called the model."""

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is called."""
        if torch.compiler.is_compiling() or not model.training:
            return
        if is_replaying() or not torch.is_grad_enabled():
            return
        with planning_lock(model):  # which another thread may have, to plan the model again
            standing = _on(model)  # none while this thread measures the model
            if standing is not None:
                standing._see_shapes(model, args, kwargs)

    def _see_shapes(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Plan the model again, or say that a step may peak higher, if it is called with more."""
        self._threads.add(get_ident())
        shapes = input_shapes(args, kwargs)
        self._larger = shapes if count_elements(shapes) > self._room else ()
        if not self._larger:
            return
        reason = self._why_not(model)
        if reason is None and self.fitting is not None:
            self._plan_again(model, args, kwargs, shapes, self.fitting)
        elif not self._has_said:
            self._has_said = True
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

    def _why_not(self, model: nn.Module) -> str | None:
        """Why a model cannot be planned again here and now."""
        if self.fitting is None:
            return "the plan was applied, not fitted"
        if compiled_around(model, [path for path, _, _ in self.plan.blocks]) is not None:
            return "its blocks are compiled; call rekindle.fit before torch.compile"
        if has_other_ranks():
            return "ranks would have to agree on when; call rekindle.fit on all of them"
        if sharded_parameters(model):
            return "its parameters are sharded, and gathered by now for this call"
        if len(self._threads) > 1:
            return "several threads train it, and another may be in the middle of a step"
        if top_hooks(False) is not None:
            return "it is called inside a region, or under saved-tensor hooks"
        if func_transform() is not None or capturing():
            return "it is called inside a transform, or captured as a CUDA graph"
        if any(map(has_accumulation_hooks, model.parameters())):
            return "a parameter has a hook that runs when its gradient is there"
        return None

    def _plan_again(
        self, model: nn.Module, args: Any, kwargs: Any, shapes: Shapes, fitting: Fitting
    ) -> None:
        from rekindle.planner.fit import fit_again  # noqa: PLC0415
        from rekindle.planner.plan_for_budget import BudgetError  # noqa: PLC0415
        from rekindle.planner.training_step import ModelCall  # noqa: PLC0415

        was = forward_of(model)
        planned = format_shapes(self.plan.inputs)
        larger = f"{format_shapes(shapes)}, larger than {planned} that its plan is for"
        try:
            plan = fit_again(model, ModelCall(*tree_map(_alone, (args, kwargs))), fitting)
        except BudgetError as error:
            raise BudgetError(
                f"{type(model).__name__} is called with {larger}, and there is no plan for that: "
                f"{error}"
            ) from error
        standing = _on(model)
        assert standing is not None, "the plan was applied"
        standing._threads |= self._threads
        if was is not None:  # the call that runs has it in its hand
            now = forward_of(model)
            was.way, was.is_on = "plain" if now is None else now.way, True
        _log.warning(
            "%s is called with %s: planned again. A step peaked at %s, and will at %s now, within "
            "%s",
            type(model).__name__,
            larger,
            format_bytes(self.plan.measured_peak or self.plan.predicted_peak),
            format_bytes(plan.measured_peak or plan.predicted_peak),
            format_bytes(plan.budget),
        )

    def after(self, _model: nn.Module, _args: Any, _kwargs: Any, out: Any) -> None:
        """A call ended, or failed: then it has no result."""
        if torch.compiler.is_compiling() or out is not None:
            return
        error = sys.exc_info()[1]
        if isinstance(error, torch.OutOfMemoryError):
            self.tell(error)

    def tell(self, error: torch.OutOfMemoryError) -> None:
        """Add what was foreseen, and by how much it was too little."""
        if not any(note.startswith(_BEGINS) for note in getattr(error, "__notes__", ())):
            error.add_note(format_excess(self.plan, wanted(error, self._device), self._larger))


@dataclass(eq=False)
class _Part:
    """Stands on a block of the model, or on what keeps a cache."""

    standing: Standing
    is_on: bool = True

    def tell(self, error: torch.OutOfMemoryError) -> None:
        self.standing.tell(error)


_BEGINS = "rekindle: the plan"
_REQUEST = re.compile(r"Tried to allocate (\d+(?:\.\d+)? [KMGT]?i?B)")


def wanted(error: torch.OutOfMemoryError, device: torch.device) -> int | None:
    """Bytes in use when memory ran out, with those that were asked for; None where nobody knows."""
    if device.type != "cuda":
        return None
    request = _REQUEST.search(str(error))
    asked = parse_bytes(request[1], "the request") if request else 0
    return torch.cuda.memory_allocated(device) + asked


def format_excess(plan: Plan, wanted: int | None, larger: Shapes = ()) -> str:
    """What a plan foresaw, what was wanted instead, and what to do."""
    shapes = f" for {format_shapes(plan.inputs)}" if plan.inputs else ""
    text = f"{_BEGINS}{shapes} foresaw a peak of {format_bytes(plan.predicted_peak)}"
    if plan.measured_peak is not None:
        text += f", measured as {format_bytes(plan.measured_peak)} when it was made"
    text += f", within a budget of {format_bytes(plan.budget)}."
    if wanted is not None:
        excess = wanted - plan.predicted_peak
        text += f" When memory ran out, {format_bytes(wanted)} were wanted: "
        if excess > 0:
            text += f"{format_bytes(excess)} more than foreseen."
        else:
            text += "no more than foreseen, so the device has less room than the budget says."
    if larger:
        text += f" The model was called with {format_shapes(larger)}, larger than that."
    return f"{text} Fit again with what is largest, or with a smaller budget."


def _alone(leaf: Any) -> Any:
    """A tensor without the graph behind it."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _see_out(_block: nn.Module, _args: Any, out: Any) -> None:
    """After the last block: have what is leaving seen out when the backward comes back to it.

    A last block that moves nothing itself would not: its backward would be on top of that.
    """
    if torch.compiler.is_compiling() or is_replaying() or func_transform() is not None:
        return
    for leaf in tree_leaves(out):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda _: begin_backward())


@dataclass(frozen=True)
class _PlanForModel:
    """A plan, as `modules.apply_strategies.apply` takes it."""

    plan: Plan

    def fates(self, model: nn.Module) -> Mapping[str, What]:
        """The strategies by the model's module paths."""
        return strategies_for(self.plan, model)

    def stand_on(self, model: nn.Module) -> None:
        """Attach the plan to a model that runs by it."""
        stand(self.plan, model)


def apply_plan(model: nn.Module, plan: Plan) -> Applied:
    """Apply a plan to a model, after checking that it is for this model; all of it or nothing."""
    return apply(model, _PlanForModel(plan))


def strategies_for(plan: Plan, model: nn.Module) -> Mapping[str, What]:
    """What each block of a model is given, by its path; an error if the plan is for another one."""
    if plan.model not in (class_name(model), type(model).__name__):
        raise ValueError(f"The plan is for a {plan.model}, but the model is a {class_name(model)}")
    where = planned_paths(model)
    for path, kind, _ in plan.blocks:
        block = model.get_submodule(where[path]) if path in where else None
        found = "nothing" if block is None else class_name(block)
        if block is None or kind not in (found, type(block).__name__):
            raise ValueError(f"The plan has a {kind} at {path!r}, but the model has {found}")
    planned = {path for path, _, _ in plan.blocks} | set(plan.unused)
    blocks = unwrapped_blocks(model)
    unplanned = [path for path in blocks if path not in planned]
    if unplanned and planned & set(blocks):
        raise ValueError(f"The model has a block that the plan has not: {unplanned[0]!r}")
    skipped = () if plan.keeps_all else (path for path in plan.unused if path in where)
    fates = {where[path]: what_of(candidate.strategy) for path, _, candidate in plan.blocks}
    return {**{where[path]: "recompute" for path in skipped}, **fates}


def planned_paths(model: nn.Module) -> dict[str, str]:
    """The model's own path of each module, by the path that a plan has for it.

    A plan's paths have no wrappers in them, but in a file of an older rekindle.
    """
    own = {path: path for path, _ in model.named_modules(remove_duplicate=False)}
    return {**own, **places(model)}


def stand(plan: Plan, model: nn.Module) -> None:
    """Let a plan stand on a model that runs by it; `rekindle.remove` takes it off."""
    standing = Standing(plan, model)
    where = planned_paths(model)
    blocks = {model.get_submodule(where[path]) for path, _, _ in plan.blocks}
    left_alone = {m for block in blocks - {model} for m in block.modules() if plan.keeps_all}
    last = model.get_submodule(where[plan.blocks[-1][0]]) if plan.offloads else None
    for module in model.modules():
        if module in left_alone:  # it fits as it is
            continue
        handles = [forbid_cache(module)]
        if module is model and plan.inputs:
            handles.append(module.register_forward_pre_hook(standing.before, with_kwargs=True))
        if module is model or (module in blocks and not plan.inputs):
            handles.append(
                module.register_forward_hook(standing.after, with_kwargs=True, always_call=True)
            )
        if module is last:
            handles.append(module.register_forward_hook(_see_out))
        found = [handle for handle in handles if handle is not None]
        if module is model:
            attach(module, standing, *found)
        elif found or module in blocks:
            attach(module, _Part(standing), *found)


def keep_fitted(model: nn.Module, fitting: Fitting) -> None:
    """Have a model that a plan stands on planned again when it is called with more."""
    standing = _on(model)
    assert standing is not None, "its plan was applied"
    standing.fitting = fitting
    where = planned_paths(model)
    if forward_of(model) is None and any(not where[path] for path, _, _ in standing.plan.blocks):
        put(model, "plain")  # so that the call that finds it too small can run by another plan


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that a model runs by: of `fit`, as it was made last, or of `apply`; None without.

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
    standing = _on(model) or _on(unwrapped(model))
    return None if standing is None else standing.plan


def _on(model: nn.Module) -> Standing | None:
    who = attached(model)
    return who if isinstance(who, Standing) else None
