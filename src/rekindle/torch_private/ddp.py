"""DDP: the reduction of gradients is paused.

Note [Steps that leave no trace in a reducer]. DDP reduces gradients from hooks on the accumulator
nodes of the parameters that it was given. These hooks count: under `static_graph` the first
backward decides how many there are in each later one, whoever ran it. They write to the buckets
that gradients may be views of, and advance what a comm hook keeps. None can be taken off. So a
step that must leave no trace runs on other parameters over the same memory, which have no hooks,
and each DDP that reduces the model's gradients has a reducer that does nothing meanwhile.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rekindle.torch_private.process_groups import in_process_group
from rekindle.torch_private.set_aside import attributes_changed


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
            stack.enter_context(attributes_changed(vars(wrapper), _IDLE))
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
