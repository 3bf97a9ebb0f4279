"""Traces a block's forward: its ops, what they make, what autograd saves, and what ops cost.

Costs are estimated from arithmetic and bytes, not timed: which results are worth keeping must not
depend on the moment.

Views are no values of a trace: a view stands for the value whose memory it shows. Tensors that
depend on parameters alone, such as casts under autocast, count as coming from outside. Ops have the
numbers they have under a policy (`ctx.number`), and the addresses by which a plan finds them again.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from rekindle.modules.unwrapping import places
from rekindle.offload.saved_tensors import KeptTensor, unpack
from rekindle.planner.devices import Device, op_seconds
from rekindle.planner.trace.block_calls import BlockCall
from rekindle.planner.types import BlockTrace, TracedOp, TracedValue
from rekindle.regions.recompute.containers import packs_arguments
from rekindle.regions.saved_indices import recomputable_indices
from rekindle.regions.selective.main_input import main_input
from rekindle.regions.selective.op_addresses import (
    ModuleFinder,
    depends_on_parameters_alone,
    is_parameter,
)
from rekindle.regions.selective.op_kinds import OpKind, can_be_run_again, kind_of
from rekindle.rows.row_tensor import runs_by_rows
from rekindle.strategy import OpAddress
from rekindle.torch_private.dispatch_modes import (
    ASKS_DEVICE,
    TorchDispatchMode,
    is_traced,
    past_modes,
)
from rekindle.torch_private.pytrees import tree_leaves
from rekindle.torch_private.storages import storage_key

_FIXED = -1
"""The index of storages whose content depends on parameters alone."""


def trace_block(call: BlockCall, device: Device) -> BlockTrace:
    """Return the trace of a block's forward, with the costs of its ops on a device.

    The forward runs three times: to have kernels chosen and loaded, to be recorded, and to see
    which saved tensors one op makes again.
    """
    forward = _fresh_forward(call)
    with call.entered():
        forward()
    forward = _fresh_forward(call)
    with call.entered():
        trace = record(forward, device, call.block)
    forward = _fresh_forward(call)
    with call.entered():
        recomputable = recomputable_indices(forward, len(trace.saved_tensors))
    given = main_input(*call.arguments)
    input_bytes = 0 if given is None or trace.communicates else _nbytes(given)
    return replace(trace, recomputable=recomputable, input_bytes=input_bytes)


def _fresh_forward(call: BlockCall) -> Callable[[], Any]:
    """The forward of a call, on arguments that no other forward has written to."""
    args, kwargs = call.fresh_arguments()
    return partial(call.block, *args, **kwargs)


@dataclass
class _Builder:
    """The trace so far. It refers to storages weakly, and so holds nothing that the block makes."""

    ops: list[TracedOp] = field(default_factory=list)
    values: list[TracedValue] = field(default_factory=list)
    saves: list[int | None] = field(default_factory=list)
    saved_in: list[str] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)
    _known: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """The index of each storage's value, by key, with a weak reference that keeps the key unique.

    A storage's object outlives its bytes as long as a weak reference to it does.
    """

    def find(self, tensor: Tensor) -> int | None:
        """Return the index of the value that a tensor is, or shows; None if it is from outside."""
        index = self._index(tensor)
        return None if index == _FIXED else index

    def is_fixed(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter, or depends on parameters alone."""
        return is_parameter(tensor) or self._index(tensor) == _FIXED

    def add(self, tensor: Tensor, maker: int | None, module: str) -> int:
        """Add a value that an op made in a module, and return its index."""
        index = len(self.values)
        self.values.append(TracedValue(_nbytes(tensor), maker, module=module))
        self._enter(tensor, index)
        return index

    def fix(self, tensor: Tensor) -> None:
        """Note that a tensor depends on parameters alone."""
        if self._index(tensor) is None:
            self._enter(tensor, _FIXED)

    def _index(self, tensor: Tensor) -> int | None:
        weak, index = self._known.get(_key(tensor), (None, None))
        return None if isinstance(weak, weakref.ref) and weak() is not tensor else index

    def _enter(self, tensor: Tensor, index: int) -> None:
        try:
            weak: Any = StorageWeakRef(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError):
            weak = weakref.ref(tensor)
        self._known[_key(tensor)] = weak, index


class _OpRecorder(TorchDispatchMode):
    """Records ops with their costs."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, built: _Builder, device: Device, block: nn.Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._built = built
        self._number = -1
        self._device = device
        self._modules = None if block is None else ModuleFinder(block)
        self.called: dict[str, None] = {}
        """Paths of modules in which ops ran, in the order of their first ops."""
        self.counts: Counter[str] = Counter()
        self.communicates = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if runs_by_rows(types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is ASKS_DEVICE or is_traced():  # traced: inside of an op that the block runs
            return func(*args, **kwargs)
        kind = kind_of(func)
        again = can_be_run_again(kind, args, kwargs)
        out = func(*args, **kwargs)
        if again:
            self._number += 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        built = self._built
        self.communicates |= _is_collective(func, given)
        if kind is OpKind.CHANGES or kind is OpKind.OPAQUE:
            built.changed.update(i for i in map(built.find, given) if i is not None)
        if not made:
            return out
        if depends_on_parameters_alone(given, built.is_fixed) and kind is not OpKind.CHANGES:
            for tensor in made:
                built.fix(tensor)
            return out
        if kind is OpKind.VIEW:
            return out
        new = [tensor for tensor in made if built.find(tensor) is None]
        inputs = tuple(i for i in map(built.find, given) if i is not None)
        maker = len(built.ops) if again else None
        module = self.current_module()
        outputs = tuple(built.add(tensor, maker, module) for tensor in new)
        if again:
            name = func.name() if hasattr(func, "name") else str(func)
            seconds = op_seconds(self._device, func, args, kwargs, out)
            address = self._address(name, module)
            built.ops.append(TracedOp(self._number, name, seconds, inputs, outputs, address))
        return out

    def current_module(self) -> str:
        """The path of the innermost module of the block that is being called."""
        paths = [] if self._modules is None else self._modules.paths()
        self.called.update(dict.fromkeys(paths))
        return paths[0] if paths else ""

    def _address(self, name: str, module: str) -> OpAddress | None:
        if self._modules is None:
            return None
        self.counts[name] += 1
        return OpAddress(module, name, self.counts[name] - 1, 0)


def record(
    forward: Callable[[], Any], device: Device, block: nn.Module | None = None
) -> BlockTrace:
    """Run a forward once, and return its trace, with the costs of its ops on a device.

    With the block, ops have addresses in it. Nothing is held that a plain forward does not hold,
    and nothing afterwards.
    """
    built = _Builder()
    has_regions = False

    def pack(tensor: Tensor) -> KeptTensor:
        nonlocal has_regions
        if not is_traced():
            built.saves.append(built.find(tensor))
            built.saved_in.append(mode.current_module())
            has_regions |= packs_arguments(sys._getframe(1))
        # Not the tensor itself: a node that saves its own output would hold itself.
        return past_modes(KeptTensor, tensor)

    mode = _OpRecorder(built, device, block)
    with saved_tensors_hooks(pack, unpack), mode:
        out = forward()
    del out
    ops = tuple(
        replace(op, address=a and replace(a, count=mode.counts[a.op]))
        for op in built.ops
        for a in [op.address]
    )
    values = (replace(value, changes=i in built.changed) for i, value in enumerate(built.values))
    saved = frozenset(index for index in built.saves if index is not None)
    return BlockTrace(
        ops,
        tuple(values),
        saved,
        tuple(built.saves),
        mode.communicates,
        saved_in=tuple(built.saved_in),
        called=() if has_regions else _recomputable_modules(mode.called, block),
    )


def _recomputable_modules(called: Iterable[str], block: nn.Module | None) -> tuple[str, ...]:
    """The modules inside a block, of those that were called, that may be recomputed.

    Not those in wrappers, whose paths vary, and scripted ones, whose forward is no Python. None of
    a block that has regions of its own: what these hold would be counted among the saved tensors.
    """
    if block is None:
        return ()
    where = places(block)
    return tuple(
        path
        for path in called
        if path
        and where.get(path) == path
        and not isinstance(block.get_submodule(path), torch.jit.ScriptModule)
    )


_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def _is_collective(func: Any, given: list[Tensor]) -> bool:
    """Return whether an op communicates with other ranks, or may, as those of a `DTensor`."""
    if getattr(func, "namespace", None) in _COLLECTIVES:
        return True
    return any(hasattr(tensor, "device_mesh") for tensor in given if type(tensor) is not Tensor)


def _key(tensor: Tensor) -> int:
    try:
        return storage_key(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _nbytes(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor.numel() * tensor.element_size()
