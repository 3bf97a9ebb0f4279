"""Data-parallel wrappers, DDP and FSDP2: the reduction of gradients is paused and put back.

An attribute that a version of torch does not have is left out.

Note [Steps that leave no trace in a reducer]. DDP reduces gradients from hooks on the accumulator
nodes of the parameters that it was given. These hooks count: under `static_graph` the first
backward decides how many there are in each later one, whoever ran it. They write to the buckets
that gradients may be views of, and advance what a comm hook keeps. None can be taken off. So a
step that must leave no trace runs on other parameters over the same memory, which have no hooks,
and each DDP that reduces the model's gradients has a reducer that does nothing meanwhile.
"""

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rekindle.torch_private.process_groups import in_process_group

# DDP


class _IdleReducer:
    """Stands for the reducer of a DDP: does nothing, whatever it is asked for."""

    def __getattr__(self, _name: str) -> Any:
        return _nothing


def _nothing(*_: Any, **__: Any) -> None:
    pass


_IDLE = {
    "reducer": _IdleReducer(),
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    "_static_graph_delay_allreduce_enqueued": True,
    "_lazy_init_ran": True,
}
"""Attributes of a DDP that takes no part in a step but for moving its inputs."""


@contextmanager
def reducers_idle(model: nn.Module) -> Iterator[None]:
    """Inside, every DDP of a model reduces nothing and counts nothing; each ends as it was.

    Tried on torch 2.11 and 2.13. The public form, `no_sync`, still counts a backward. Goes when it
    does not.
    """
    with ExitStack() as stack:
        for wrapper in _wrappers_of(model):
            stack.enter_context(_changed(vars(wrapper), _IDLE))
        yield


def _wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """Every DDP that reduces gradients of a model: inside it, the model itself, or around it.

    A module does not know of a DDP around it, and neither do its parameters: the garbage collector
    does.
    """
    if not in_process_group():
        return []
    _make_late_wrappers(model)
    own = {id(parameter) for parameter in model.parameters()}
    kinds = _with_subclasses(DistributedDataParallel)
    # Those in the model first: `gc.freeze()` hides objects from the collector.
    found = {each: None for each in (*model.modules(), *gc.get_objects()) if type(each) in kinds}
    return [wrapper for wrapper in found if not own.isdisjoint(map(id, wrapper.parameters()))]


def _make_late_wrappers(model: nn.Module) -> None:
    """Have `replicate` make its DDP now, and not in a first call, of what is in place then."""
    contract = sys.modules.get("torch.distributed._composable.contract")
    if contract is None:
        return
    for module in model.modules():
        for state in vars(module).get(contract.STATE_KEY, {}).values():
            if getattr(state, "_init_args", None) and hasattr(state, "lazy_init"):
                state.lazy_init()


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


# FSDP2


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
            stack.enter_context(_changed(vars(context), {"is_last_backward": True}))
        for group in groups:
            stack.enter_context(_changed(vars(group), _REDUCING))
            for sharded in group.fsdp_params:
                stack.enter_context(_changed(vars(sharded), {"unsharded_accumulated_grad": None}))
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
                stack.enter_context(_changed(vars(group), {"reshard_after_backward": False}))
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


# Both


@contextmanager
def gradient_set_aside(parameter: Tensor) -> Iterator[None]:
    """Inside, a parameter has no gradient of before; then it has that one, by reference.

    Public names, tried on torch 2.11 and 2.13. Goes when `sharded_gradients_set_aside` does.
    """
    before = parameter.grad
    parameter.grad = None
    try:
        yield
    finally:
        parameter.grad = before


@contextmanager
def _changed(attributes: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    """Inside, the attributes that exist among `values` have those; then their own again."""
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update({name: values[name] for name in before})
    try:
        yield
    finally:
        attributes.update(before)
