"""Records a region's forward, op by op, and asks the policy what becomes of each result."""

from enum import Enum
from threading import local
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.compiled.handover import SAC_IGNORED_OPS
from rekindle.internals import capturing, storage_key
from rekindle.replay import rng as random_state
from rekindle.replay.switches import recomputing
from rekindle.selective.contexts import Counter
from rekindle.selective.fates import Fate
from rekindle.selective.record import (
    Call,
    Held,
    Hooks,
    Value,
    nbytes_of,
    source_bytes,
    tensors_of,
)
from rekindle.selective.tiers import hooks_of, pause

if TYPE_CHECKING:
    from rekindle.policies import Policy


class _Kind(Enum):
    """What there is to know of an op before it runs."""

    VIEW = "shows an argument in another way"
    PURE = "makes its results from its arguments, the same every time"
    RANDOM = "draws random numbers, or may"
    CHANGES = "changes an argument"
    LOOSE = "leaves its result unwritten, or changes what its schema does not say"


_VIEWS = ("_unsafe_view", "wait_tensor")
"""Show their argument's memory, though their schema does not say so."""
_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_CHANGES_BUFFERS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm")
_PURE_OPERATORS = ("flex_attention",)
"""Higher-order operators that can be run again; of others nobody knows."""
_OWN = ("aten", "prims", "_c10d_functional")
"""Namespaces whose ops say of themselves whether they draw random numbers."""
_kinds: dict[Any, _Kind] = {}
_RECOMPUTE = Fate.RECOMPUTE


def _kind_of(func: Any) -> _Kind:
    """How an op is treated: Note [What is not made again]."""
    if not hasattr(func, "_schema"):
        kind = _Kind.PURE if func.name() in _PURE_OPERATORS else _Kind.LOOSE
    else:
        kind = _kind_by_schema(func)
    _kinds[func] = kind
    return kind


def _kind_by_schema(func: Any) -> _Kind:
    name = func.name().split("::")[-1].split(".")[0]
    if func._schema.is_mutable:
        return _Kind.CHANGES
    if name in _UNWRITTEN or any(part in name for part in _CHANGES_BUFFERS):
        return _Kind.LOOSE
    if torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in _OWN:
        return _Kind.RANDOM
    if func.is_view or name in _VIEWS:
        return _Kind.VIEW
    return _Kind.PURE


class _Running(local):
    """The regions that are recorded on this thread, the innermost last."""

    def __init__(self) -> None:
        self.modes: list[RecordMode] = []


_running = _Running()


def is_recording() -> bool:
    """Whether a region is being recorded on this thread."""
    return bool(_running.modes)


def name_tensor(tensor: Tensor, name: str) -> None:
    """A tensor gets a name in every region that is being recorded."""
    for mode in _running.modes:
        mode.name(tensor, name)


class RecordMode(TorchDispatchMode):
    """Entered around a region's forward."""

    supports_higher_order_operators = True

    def __init__(self, policy: "Policy", hooks: Hooks | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._policy = policy
        self._hooks = hooks
        """The saved-tensor hooks around the region, which get to see what is kept."""
        self._fates: dict[Any, Fate] = _remembered(policy) if policy.by_op_alone else {}
        self._input_keepers: dict[Any, bool] = _input_keepers.setdefault(policy, {})
        self._values: dict[int, tuple[ref[Tensor], Value]] = {}
        """The value of each tensor that lives, by the tensor's id."""
        self._held: dict[int, list[tuple[ref[Value], ref[Tensor]]]] = {}
        """Values that are held, by storage: copied before the storage changes."""
        self._fresh: list[tuple[Tensor, Value, Any, Hooks | None]] = []
        """What the last op made and is to be held: autograd has not marked it yet."""
        self._later: list[tuple[Tensor, ref[Value], Any, Hooks]] = []
        """What hooks are to hold: handed to them at the end, when it is known who needs it."""
        self._counter = Counter()
        self._is_blind = False
        """Whether what runs now is not the region's."""
        self._just_saved: set[Value] = set()
        """What autograd saved since the last op: Note [What an op saves before it runs]."""
        self._tiers: set[Fate] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to keep the compiler out of every op costs as much as noting it

    def __enter__(self) -> Any:
        _running.modes.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        _running.modes.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def value_of(self, tensor: Tensor) -> Value:
        """The value of a tensor; one that the region did not make is held as it is."""
        found = self._values.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        value = Value(None)
        if _may_be_a_buffer(tensor):
            value.hold(Held(tensor.detach().clone(), None, self._hooks))
            self._values[id(tensor)] = ref(tensor), value
        else:
            self._hold(tensor, value, None, self._hooks_for(tensor))
        return value

    def know(self, tensor: Tensor, value: Value) -> None:
        """A backward inside the region was given this tensor for a value."""
        if self in _running.modes:
            self._values[id(tensor)] = ref(tensor), value

    def saved(self, tensor: Tensor) -> Value:
        """The value of a tensor that autograd saves."""
        found = self._values.get(id(tensor))
        if found is not None and found[0]() is tensor:
            value = found[1]
        else:
            self._is_blind = True
            try:
                value = self.value_of(tensor)
            finally:
                self._is_blind = False
        self._just_saved.add(value)
        return value

    def name(self, tensor: Tensor, name: str) -> None:
        """A tensor gets a name: perhaps the policy wants it held for that."""
        found = self._values.get(id(tensor))
        fate = self._policy.fate_of_name(name)
        if fate is None or fate is Fate.RECOMPUTE or found is None or found[0]() is not tensor:
            return
        if found[1].held is None:
            self._fresh.append((tensor, found[1], name, self._hooks_of(fate)))
            self._note(tensor, found[1])

    def held_values(self) -> list["ref[Value]"]:
        """Everything that was held, whether or not anything needs it."""
        return [value for values in self._held.values() for value, _ in values]

    def _hold(self, tensor: Tensor, value: Value, what: Any, hooks: Hooks | None) -> None:
        value.hold(Held(tensor, what, hooks))
        self._note(tensor, value)

    def _note(self, tensor: Tensor, value: Value) -> None:
        self._values[id(tensor)] = ref(tensor), value
        self._held.setdefault(_storage(tensor), []).append((ref(value), ref(tensor)))

    def _hooks_for(self, tensor: Tensor) -> Hooks | None:
        return None if tensor.is_leaf and tensor.requires_grad else self._hooks

    def _hooks_of(self, fate: Fate) -> Hooks | None:
        """Who is to hold what has a fate: hooks around the region, if any, such as a region's.

        What a replay saves is used at once, so there it is kept.
        """
        if fate is Fate.KEEP or self._hooks is not None or recomputing.get() or capturing():
            return self._hooks
        self._tiers.add(fate)
        return hooks_of(fate)

    def close(self, failed: bool) -> None:
        """The forward is over: only what autograd saved keeps values alive."""
        self.settle()
        later, self._later = self._later, []
        self._just_saved.clear()
        self._values.clear()
        self._held.clear()
        try:
            while later and not failed:
                tensor, weak, func, hooks = later.pop(0)
                value = weak()
                if value is not None:
                    value.hold(Held(tensor, func, hooks))
        finally:
            pause(self._tiers, failed)

    def settle(self) -> None:
        """Hand what the last op made to whoever holds it: by now autograd has marked it."""
        fresh, self._fresh = self._fresh, []
        was_blind, self._is_blind = self._is_blind, True
        try:
            for tensor, value, func, hooks in fresh:
                if hooks is None:
                    value.hold(Held(tensor, func, None))
                else:
                    self._later.append((tensor, ref(value), func, hooks))
        finally:
            self._is_blind = was_blind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._is_blind:
            return func(*args, **(kwargs or {}))
        if self._fresh:
            self.settle()
        kind = _kinds.get(func) or _kind_of(func)
        if kind is _Kind.PURE or kind is _Kind.VIEW:
            out = func(*args, **kwargs) if kwargs else func(*args)
            rng = None
        elif kind is _Kind.RANDOM and not (kwargs and kwargs.get("generator") is not None):
            rng = random_state.take(())
            out = func(*args, **(kwargs or {}))
        else:
            return self._run_loose(func, kind, args, kwargs or {})
        if self._just_saved:
            self._just_saved.clear()
        inputs: list[Value] = []
        call = Call(func, self._noted(args, inputs), kwargs and self._named(kwargs, inputs), inputs)
        call.rng = rng
        if kind is not _Kind.VIEW and self._keeps_inputs(func):
            self._keep_inputs(args)
        fate = self._fates.get(func) or self._fate(func, out, args, kwargs or {})
        if kind is _Kind.VIEW and fate is _RECOMPUTE and inputs:
            held = inputs[0].held
            if held is not None and held.can_be_shown:
                fate = Fate.KEEP  # a view of what is held costs nothing
        for tensor in (out,) if isinstance(out, Tensor) else tensors_of(out):
            value = Value(call)
            call.outs.append(ref(value))
            if fate is _RECOMPUTE:
                self._values[id(tensor)] = ref(tensor), value
            else:
                self._note(tensor, value)
                self._fresh.append((tensor, value, func, self._hooks_of(fate)))
        return out

    def _run_loose(
        self, func: Any, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an op that is not made again: Note [What is not made again]."""
        if kind is _Kind.CHANGES:
            return self._change(func, args, kwargs)
        self._just_saved.clear()
        out = func(*args, **kwargs)
        for tensor in tensors_of(out):
            self._hold(tensor, Value(None), func, self._hooks_for(tensor))
        return out

    def _keeps_inputs(self, func: Any) -> bool:
        known = self._input_keepers.get(func)
        if known is None:
            known = self._input_keepers[func] = self._policy.keeps_inputs(func)
        return known

    def _keep_inputs(self, args: tuple[Any, ...]) -> None:
        """Keep an op's inputs rather than what they were made from, where that is as large."""
        for tensor in tensors_of(args):
            value = self.value_of(tensor)
            if value.held is None and nbytes_of(tensor) <= source_bytes(value):
                self._hold(tensor, value, None, self._hooks_for(tensor))

    def _fate(self, func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fate:
        """Ask the policy."""
        if func in SAC_IGNORED_OPS:
            return Fate.RECOMPUTE
        policy = self._policy
        ctx = self._counter.context(func, out, args, kwargs, is_recompute=False)
        fate = policy.fate(ctx) or Fate.RECOMPUTE
        if policy.by_op_alone:
            self._fates[func] = fate
        return fate

    def _noted(self, args: Any, inputs: list[Value]) -> Any:
        """Arguments with values in place of tensors."""
        noted = []
        known = self._values
        for arg in args:
            if isinstance(arg, Tensor):
                found = known.get(id(arg))
                value = found[1] if found and found[0]() is arg else self.value_of(arg)
                inputs.append(value)
                noted.append(value)
            elif type(arg) is list or type(arg) is tuple:
                noted.append(self._noted(arg, inputs))
            else:
                noted.append(arg)
        return tuple(noted) if type(args) is tuple else noted

    def _named(self, kwargs: dict[str, Any], inputs: list[Value]) -> dict[str, Any]:
        return dict(zip(kwargs, self._noted(list(kwargs.values()), inputs), strict=True))

    def _change(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that changes some of its arguments: what was held of them is copied before.

        Note [What an op saves before it runs]. Autograd saves an op's arguments just before the op.
        One that the op then changes is either a result that it fills (`rrelu`'s noise), or a
        mistake that the version counter tells of: both want the tensor itself, and no copy.
        """
        keys = {_storage(tensor) for tensor in _changed(func, args, kwargs)}
        self._save_from_change(keys)
        self._just_saved.clear()
        out = func(*args, **kwargs)
        for number, known in list(self._values.items()):
            tensor = known[0]()
            if tensor is None or _storage(tensor) in keys:
                del self._values[number]
        return out

    def _save_from_change(self, keys: set[int]) -> None:
        """Copy what is held, or is to be, of storages that are about to change."""
        self._later = [
            (x.detach().clone() if _storage(x) in keys else x, weak, maker, hooks)
            for x, weak, maker, hooks in self._later
        ]
        for key in keys:
            for weak, tensor in self._held.pop(key, ()):
                value, now = weak(), tensor()
                if value is None or now is None or value.held is None:
                    continue
                if value not in self._just_saved:
                    value.hold(Held(now.detach().clone(), None, self._hooks))


_tables: dict[Any, dict[Any, Fate]] = {}
_input_keepers: dict[Any, dict[Any, bool]] = {}


def _remembered(policy: Any) -> dict[Any, Fate]:
    """What a policy that looks at ops alone has answered so far."""
    return _tables.setdefault(policy, {})


_SMALL = 1 << 16


def _may_be_a_buffer(tensor: Tensor) -> bool:
    """Whether a tensor from outside may change until backward, and is cheap to copy.

    Statistics, counters, scales: another forward changes them, some kernels without moving their
    version. A large one that changes is an error, which says so.
    """
    if tensor.requires_grad or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return False
    return 0 < nbytes_of(tensor) <= _SMALL


def _storage(tensor: Tensor) -> int:
    """What tells whether tensors share memory; 0 for those of which nobody knows, and so may."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return 0
    return storage_key(tensor.untyped_storage())


_PLAIN = (Tensor, nn.Parameter, FakeTensor)


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
