"""Traces a compiled block: what its graphs save, by the index that autograd saves it at.

The ops of a compiler's code cannot be seen while it runs. So the trace of a compiled block has one
op for each saved value, with the name of the op in the graph that makes it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rekindle.modules.compiled_blocks import compiled_forward_of
from rekindle.offload.saved_tensors import KeptTensor, unpack
from rekindle.planner.instruments.memory_meter import storages_of
from rekindle.planner.nested_tensors import tensors_in
from rekindle.planner.trace.block_calls import Arguments, BlockCall
from rekindle.planner.types import BlockTrace, TracedOp, TracedValue
from rekindle.regions.selective.op_addresses import is_parameter
from rekindle.torch_private.dispatch_modes import is_traced
from rekindle.torch_private.partitioned_graphs import INPUT
from rekindle.torch_private.storages import storage_key

_UNNAMED = "tensor"
"""The name of what a graph saves that torch has read from a cache."""
_FIXED = -1
"""The key of what a block saves and did not make."""


def trace_compiled(call: BlockCall) -> BlockTrace:
    """Return the trace of a compiled block's forward, by the strategy that it has now."""
    saved: list[_Saved] = []

    def see(tensor: Tensor) -> None:
        storages = storages_of(tensor)
        if len(storages) == 1 and not is_parameter(tensor):
            key, nbytes = storage_key(storages[0]), storages[0].nbytes()
        else:  # nothing that is moved: a parameter, or a tensor that is made of others
            key, nbytes = _FIXED, 0
        saved.append(_Saved(key, nbytes, tuple(tensor.shape)))

    args, kwargs = _run(call, see)
    given = tensors_in((args, kwargs))
    inputs = _keys(tensor for tensor in given if tensor.requires_grad)
    others = (tensor for tensor in given if not tensor.requires_grad)
    outside = _keys((*call.block.parameters(), *call.block.buffers(), *others))
    forward = compiled_forward_of(call.block)
    names = [] if forward is None else forward.names_of_saved([each.shape for each in saved])
    return _trace_of(saved, outside | {_FIXED}, inputs - outside, names)


class _Saved(NamedTuple):
    """One tensor that autograd saved."""

    key: int
    """Of its storage."""
    nbytes: int
    shape: tuple[int, ...]


def _keys(tensors: Iterable[Tensor]) -> set[int]:
    return {storage_key(storage) for tensor in tensors for storage in storages_of(tensor)}


def _run(call: BlockCall, see: Callable[[Tensor], None]) -> Arguments:
    """Run the forward, and show what autograd saves; returns the arguments."""

    def pack(tensor: Tensor) -> KeptTensor:
        if not is_traced():
            see(tensor)
        return KeptTensor(tensor)  # not the tensor itself: a node would hold itself

    args, kwargs = call.fresh_arguments()
    with saved_tensors_hooks(pack, unpack), call.entered():
        out = call.block(*args, **kwargs)
    del out
    return args, kwargs


def _trace_of(
    saved: Sequence[_Saved], outside: set[int], inputs: set[int], names: Sequence[str]
) -> BlockTrace:
    """The trace of a block that saved these tensors."""
    named = names or [_UNNAMED] * len(saved)
    ops: list[TracedOp] = []
    values: list[TracedValue] = []
    known: dict[int, int] = {}
    places: list[int | None] = []
    for (key, nbytes, _), name in zip(saved, named, strict=True):
        is_input = key in inputs
        if key in outside or (name == INPUT and not is_input):
            places.append(None)
            continue
        if key not in known:
            known[key] = index = len(values)
            ops.append(TracedOp(index, INPUT if is_input else name, 0.0, (), (index,)))
            values.append(TracedValue(nbytes, index, is_input=is_input))
        places.append(known[key])
    return BlockTrace(
        tuple(ops),
        tuple(values),
        frozenset(known.values()),
        tuple(places),
        saved_in=("",) * len(places),
    )
