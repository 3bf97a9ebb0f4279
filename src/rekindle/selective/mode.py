"""Records a region's forward, op by op, and asks the policy what becomes of each result."""

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.internals import storage_key
from rekindle.replay import rng as random_state
from rekindle.selective.record import Call, Held, Value, tensors_of

Keeps = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Asked for the fate of what an op made: its result, the op, its arguments."""


class _Kind(Enum):
    """What there is to know of an op before it runs."""

    VIEW = "shows an argument in another way"
    PURE = "makes its results from its arguments, the same every time"
    RANDOM = "draws random numbers"
    CHANGES = "changes an argument"
    LOOSE = "leaves its result unwritten, or changes what its schema does not say"
    UNSEEN = "of no interest"


_VIEWS = ("_unsafe_view",)
"""Show their argument's memory, though their schema does not say so."""
_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_CHANGES_BUFFERS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm")
_kinds: dict[Any, _Kind] = {}


def _kind_of(func: Any) -> _Kind:
    """How an op is treated: Note [What is not made again]."""
    name = func.name().split("::")[-1].split(".")[0] if hasattr(func, "_schema") else ""
    if not name:
        kind = _Kind.LOOSE
    elif func._schema.is_mutable:
        kind = _Kind.CHANGES
    elif name in _UNWRITTEN or any(part in name for part in _CHANGES_BUFFERS):
        kind = _Kind.LOOSE
    elif torch.Tag.nondeterministic_seeded in func.tags:
        kind = _Kind.RANDOM
    elif func.is_view or name in _VIEWS:
        kind = _Kind.VIEW
    else:
        kind = _Kind.PURE
    _kinds[func] = kind
    return kind


class RecordMode(TorchDispatchMode):
    """Entered around a region's forward."""

    def __init__(self, keeps: Keeps, hooks: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps = keeps
        self._hooks = hooks
        self._values: dict[int, tuple[ref[Tensor], Value]] = {}
        """The value of each tensor that lives, by the tensor's id."""
        self._held: dict[int, list[tuple[ref[Value], ref[Tensor]]]] = {}
        """Values that are held, by storage: copied before the storage changes."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to keep the compiler out of every op costs as much as noting it

    def value_of(self, tensor: Tensor) -> Value:
        """The value of a tensor; one that the region did not make is held as it is."""
        found = self._values.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        return self._hold(tensor, Value(None), "A tensor from outside the region")

    def _hold(self, tensor: Tensor, value: Value, what: str) -> Value:
        value.hold(Held(tensor, what, self._hooks_for(tensor)))
        self._values[id(tensor)] = ref(tensor), value
        if tensor.layout is torch.strided and type(tensor) is Tensor:
            key = storage_key(tensor.untyped_storage())
            self._held.setdefault(key, []).append((ref(value), ref(tensor)))
        return value

    def _hooks_for(self, tensor: Tensor) -> Any:
        return None if tensor.is_leaf and tensor.requires_grad else self._hooks

    def close(self) -> None:
        """The forward is over: only what autograd saved keeps values alive."""
        self._values.clear()
        self._held.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kinds.get(func) or _kind_of(func)
        if kind is _Kind.CHANGES:
            return self._change(func, args, kwargs)
        rng = random_state.take(()) if kind is _Kind.RANDOM else None
        out = func(*args, **kwargs)
        if kind is _Kind.LOOSE:
            for tensor in tensors_of(out):
                self._hold(tensor, Value(None), f"What {func} made")
            return out
        inputs: list[Value] = []
        call = Call(func, self._noted(args, inputs), kwargs and self._named(kwargs, inputs), inputs)
        call.rng = rng
        keeps = self._keeps(out, func, args, kwargs)
        if kind is _Kind.VIEW and inputs[0].held is not None:
            keeps = keeps or inputs[0].held.can_be_shown  # a view of what is held costs nothing
        values = self._values
        for tensor in tensors_of(out):
            value = Value(call)
            call.outs.append(ref(value))
            if keeps:
                self._hold(tensor, value, f"What {func} made")
            else:
                values[id(tensor)] = ref(tensor), value
        return out

    def _noted(self, args: Iterable[Any], inputs: list[Value]) -> Any:
        """Arguments with values in place of tensors."""
        noted = []
        for arg in args:
            if isinstance(arg, Tensor):
                value = self.value_of(arg)
                inputs.append(value)
                noted.append(value)
            elif type(arg) in (list, tuple):
                noted.append(self._noted(arg, inputs))
            else:
                noted.append(arg)
        return tuple(noted) if type(args) is tuple else noted

    def _named(self, kwargs: dict[str, Any], inputs: list[Value]) -> dict[str, Any]:
        return dict(zip(kwargs, self._noted(list(kwargs.values()), inputs), strict=True))

    def _change(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that changes some of its arguments: what was held of them is copied before."""
        keys = {_storage(tensor) for tensor in _changed(func, args, kwargs)}
        for key in keys:
            for held in self._held.pop(key, ()):
                value, tensor = held[0](), held[1]()
                if value is not None and tensor is not None:
                    value.hold(Held(tensor.detach().clone(), "A copy", self._hooks))
        out = func(*args, **kwargs)
        for number, known in list(self._values.items()):
            tensor = known[0]()
            if tensor is None or _storage(tensor) in keys:
                del self._values[number]
        return out


def _storage(tensor: Tensor) -> int:
    try:
        return storage_key(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return 0


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an op changes, by its schema."""
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name)
            if position < len(args):
                given = args[position]
            found += tensors_of(given)
    return found
