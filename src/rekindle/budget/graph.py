"""A block's forward as a graph: its ops, what they make, what autograd saves, and what ops cost.

Costs are estimated from arithmetic and bytes, not timed: which results are worth keeping must not
depend on the moment.

Views are not in it: what shows a value's memory stands for that value. Ops have the numbers they
have under a policy (`ctx.number`), so a choice made here can be carried out there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rekindle.budget.devices import Device, seconds_of
from rekindle.internals import ASKS_DEVICE, is_traced, storage_key
from rekindle.selective.kinds import Kind, can_be_run_again, kind_of


@dataclass(frozen=True)
class Op:
    """One op that can be run again."""

    number: int
    name: str
    seconds: float
    """An estimate, to be compared with that of other ops."""
    inputs: tuple[int, ...]
    """The values it is given that the block made, by their index."""
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """One storage that the block made."""

    nbytes: int
    maker: int | None
    """The index of the op that makes it; None if it cannot be made again, and is held if needed."""
    changes: bool = False
    """Whether it is written to after it was made: then it is no good to send it away at once."""


@dataclass(frozen=True)
class Graph:
    """What a block does in forward."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    saved: frozenset[int]
    """Values that autograd saves."""
    saves: tuple[int | None, ...] = ()
    """What autograd saves, one after the other: a value, or None for what comes from outside."""


@dataclass
class _Builder:
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    saves: list[int | None] = field(default_factory=list)
    by_storage: dict[int, int] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)
    alive: list[Tensor] = field(default_factory=list)
    """So that no address is used twice."""

    def find(self, tensor: Tensor) -> int | None:
        return self.by_storage.get(_key(tensor))

    def add(self, tensor: Tensor, maker: int | None) -> int:
        index = len(self.values)
        self.values.append(Value(_nbytes(tensor), maker))
        self.by_storage[_key(tensor)] = index
        self.alive.append(tensor.detach())
        return index


class _GraphMode(TorchDispatchMode):
    """Records ops with their costs."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, built: _Builder, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._built = built
        self._number = -1
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is ASKS_DEVICE or is_traced():  # the latter: by an op, which is what the block runs
            return func(*args, **kwargs)
        kind = kind_of(func)
        again = can_be_run_again(kind, args, kwargs)
        out = func(*args, **kwargs)
        if again:
            self._number += 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        built = self._built
        if kind is Kind.CHANGES or kind is Kind.OPAQUE:
            built.changed.update(i for i in map(built.find, given) if i is not None)
        if kind is Kind.VIEW or not made:
            return out
        new = [tensor for tensor in made if built.find(tensor) is None]
        inputs = tuple(i for i in map(built.find, given) if i is not None)
        maker = len(built.ops) if again else None
        outputs = tuple(built.add(tensor, maker) for tensor in new)
        if again:
            name = func.name() if hasattr(func, "name") else str(func)
            seconds = seconds_of(self._device, func, args, kwargs, out)
            built.ops.append(Op(self._number, name, seconds, inputs, outputs))
        return out


def record(forward: Callable[[], Any], device: Device) -> Graph:
    """The graph of a block's forward, which runs once, with what its ops cost on a device."""
    built = _Builder()

    def pack(tensor: Tensor) -> Tensor:
        if not is_traced():
            built.saves.append(built.find(tensor))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), _GraphMode(built, device):
        out = forward()
    del out
    values = (replace(value, changes=i in built.changed) for i, value in enumerate(built.values))
    saved = frozenset(index for index in built.saves if index is not None)
    return Graph(tuple(built.ops), tuple(values), saved, tuple(built.saves))


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
