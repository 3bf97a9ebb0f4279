"""FSDP2: parameters are gathered around blocks, and accumulated gradients are put aside."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from rekindle.torch_private.set_aside import attributes_changed, gradient_set_aside


def sharded_groups(model: nn.Module) -> list[Any]:
    """The groups of parameters that FSDP2 gathers and reduces together, for a whole model.

    Tried on torch 2.11, where a unit has one at most, and 2.13, where it has a list. Goes when
    torch has a public form.
    """
    groups = {id(group): group for unit in _units(model) for group in _groups_of(unit)}
    return list(groups.values())


def _groups_of(unit: Any) -> list[Any]:
    """The groups of one unit."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def sharded_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The shards that FSDP holds, which it puts in the place of parameters by itself.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    groups = sharded_groups(model)
    found = {sharded.sharded_param for group in groups for sharded in group.fsdp_params}
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FullyShardedDataParallel", ())
    for module in model.modules():
        if isinstance(module, kind):
            found.update(module.parameters())
    return found


def reshard(model: nn.Module) -> None:
    """Have every unit of FSDP2 hold its shard alone, as it does between steps.

    Public names, tried on torch 2.11 and 2.13. Goes when `gathered_around` does.
    """
    for unit in _units(model):
        unit.reshard()


@contextmanager
def sharded_gradients_set_aside(model: nn.Module) -> Iterator[None]:
    """Inside, FSDP2 has accumulated nothing, and reduces in each backward; then it is as it was.

    This holds for gradients that it keeps beside `parameter.grad`: those of whole parameters, which
    were not reduced yet, and those that were reduced within a group of ranks and not among groups.
    A hook that a user runs on reduced gradients, which may count, does not run.

    Tried on torch 2.11 and 2.13. Goes when torch can put accumulated gradients aside.
    """
    groups = sharded_groups(model)
    reshard(model)
    with ExitStack() as stack:
        for unit in _units(model):
            context = unit._get_fsdp_state()._state_ctx
            stack.enter_context(attributes_changed(vars(context), {"is_last_backward": True}))
        for group in groups:
            stack.enter_context(attributes_changed(vars(group), _REDUCING))
            for sharded in group.fsdp_params:
                stack.enter_context(
                    attributes_changed(vars(sharded), {"unsharded_accumulated_grad": None})
                )
                whole = getattr(sharded, "_unsharded_param", None)
                if whole is not None:
                    stack.enter_context(gradient_set_aside(whole))
        stack.callback(reshard, model)
        yield


@contextmanager
def gathered_around(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, each block of a model can be called alone, whatever unit of FSDP2 it is a part of.

    A unit that is a block, or in one, gathers its parameters when the block is called. One that has
    more in it than a block is gathered here; gradients of its parameters are let go of.

    Tried on torch 2.11 and 2.13. Goes when gradients of gathered parameters have a public form.
    """
    blocks = list(blocks)
    inside = {module for block in blocks for module in block.modules()}
    wanted = {parameter for block in blocks for parameter in block.parameters()}
    with ExitStack() as stack:
        for unit in _units(model):
            groups = _groups_of(unit)
            shards = {sharded.sharded_param for group in groups for sharded in group.fsdp_params}
            if unit in inside or shards.isdisjoint(wanted):
                continue
            for group in groups:
                stack.enter_context(
                    attributes_changed(vars(group), {"reshard_after_backward": False})
                )
            stack.callback(unit.reshard)
            unit.unshard()
            for sharded in (sharded for group in groups for sharded in group.fsdp_params):
                whole = sharded._unsharded_param
                if whole.requires_grad:
                    stack.callback(whole.register_post_accumulate_grad_hook(_let_go).remove)
        yield


def _let_go(parameter: Tensor) -> None:
    parameter.grad = None


_REDUCING = {
    "reduce_grads": True,
    "all_reduce_grads": True,
    "reshard_after_backward": True,
    "_partial_reduce_output": None,
    "_all_reduce_hook": None,
    "_all_reduce_hook_stream": None,
}
"""Attributes of a group of FSDP2 that has accumulated nothing and reduces all."""


def _units(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a model has none of it before it is there
    kind = getattr(fsdp, "FSDPModule", ())
    return [module for module in model.modules() if isinstance(module, kind)]


def chosen_by_wrap_policy(policy: Any, model: nn.Module) -> dict[nn.Module, dict[str, Any]] | None:
    """The modules that a policy of `torch.distributed.fsdp.wrap` chooses, with options for each.

    None for what is no such policy. Tried on torch 2.11 and 2.13: the one way to ask a
    `CustomPolicy`, which cannot be called. Goes when it can.
    """
    if not hasattr(policy, "_run_policy"):
        return None
    chosen: dict[nn.Module, dict[str, Any]] = policy._run_policy(
        model, ignored_modules=set(), root_kwargs={}
    )
    return chosen
