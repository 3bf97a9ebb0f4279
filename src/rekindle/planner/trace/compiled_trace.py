"""Traces a compiled block: what its graphs save, by the index that autograd saves it at.

The ops of a compiler's code cannot be seen while it runs. So a trace of a compiled block has one op
for each saved value, with the name of the op in the graph that made it, if the graph was seen: it
is while it is compiled.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rekindle.offload.saved_tensors import KeptTensor, unpack
from rekindle.planner.instruments.memory_meter import storages_of
from rekindle.planner.nested_tensors import tensors_in
from rekindle.planner.trace.block_calls import Arguments, BlockCall
from rekindle.planner.types import BlockTrace, TracedOp, TracedValue
from rekindle.torch_private.dispatch_modes import is_traced
from rekindle.torch_private.partitioned_graphs import pass_over_graph_pairs
from rekindle.torch_private.storages import storage_key


@dataclass
class SavedNames:
    """Names of the ops whose results the graphs save that were compiled last."""

    names: list[str] = field(default_factory=list)

    def see(self, forward: Any, _backward: Any, outputs: int) -> None:
        """Note the names of what one pair of graphs saves."""
        (output,) = forward.graph.find_nodes(op="output")
        saved = [node for node in output.args[0][outputs:] if _is_tensor(node)]
        self.names += [_name_of(node) for node in saved]


def trace_compiled(call: BlockCall) -> BlockTrace:
    """Return the trace of a compiled block's forward, by the strategy that it has now.

    It runs once to be compiled, if it was not, and once to be traced.
    """
    names = SavedNames()
    with pass_over_graph_pairs(names.see):
        _run(call, lambda _: None)
    saved: list[tuple[int, int]] = []

    def see(tensor: Tensor) -> None:
        storages = storages_of(tensor)
        if len(storages) == 1:
            saved.append((storage_key(storages[0]), storages[0].nbytes()))
        else:
            saved.append((-1, 0))

    args, kwargs = _run(call, see)
    given = tensors_in((args, kwargs))
    inputs = _keys(tensor for tensor in given if tensor.requires_grad)
    others = (tensor for tensor in given if not tensor.requires_grad)
    outside = _keys((*call.block.parameters(), *call.block.buffers(), *others))
    return _trace_of(saved, outside | {-1}, inputs - outside, names.names)


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
    saved: list[tuple[int, int]], outside: set[int], inputs: set[int], names: list[str]
) -> BlockTrace:
    """The trace of a block that saved these storages, by key and bytes."""
    named = names if len(names) == len(saved) else [""] * len(saved)
    ops: list[TracedOp] = []
    values: list[TracedValue] = []
    known: dict[int, int] = {}
    places: list[int | None] = []
    for (key, nbytes), name in zip(saved, named, strict=True):
        if key in outside:
            places.append(None)
            continue
        if key not in known:
            known[key] = index = len(values)
            word = "input" if key in inputs else name
            ops.append(TracedOp(index, word, 0.0, (), (index,)))
            values.append(TracedValue(nbytes, index, is_input=key in inputs))
        places.append(known[key])
    return BlockTrace(
        tuple(ops),
        tuple(values),
        frozenset(known.values()),
        tuple(places),
        saved_in=("",) * len(places),
    )


def _is_tensor(node: Any) -> bool:
    return isinstance(getattr(node, "meta", {}).get("val"), Tensor)


def _name_of(node: Any) -> str:
    """The name of the op that made a node's tensor, whatever views are taken of it."""
    if node.op != "call_function":
        return "input"
    target = node.target
    if getattr(target, "is_view", False) or target.__name__ in ("getitem", "detach", "alias"):
        return _name_of(node.args[0])
    return str(target.name()) if hasattr(target, "name") else str(target)
