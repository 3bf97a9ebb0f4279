"""What a region that is being recorded knows of its tensors: which value each has, what is held.

Tensors are known by their identity, and as long as they have the memory they had: what an op
changes in place, or exchanges, gets another value, and what was held of it is copied before.
"""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from rekindle.regions.selective.autocast_casts import CAST, cast_parameter
from rekindle.regions.selective.op_addresses import is_parameter
from rekindle.regions.selective.op_graph import Call, Held, Hooks, Value, copy_of, nbytes_of
from rekindle.torch_private.autocast import any_autocast
from rekindle.torch_private.fake_mode import FakeTensor
from rekindle.torch_private.storages import storage_key

_SMALL = 1 << 18
_MANY = 16


class Book:
    """The tensors of one region."""

    def __init__(
        self, hooks: Hooks | None, is_replayed: Callable[[Tensor], bool] | None = None
    ) -> None:
        self._is_replayed = is_replayed
        """Tells whether compiled code in the region made a tensor, if there may be any."""
        self._hooks = hooks
        """The saved-tensor hooks around the region, which get to see what is kept."""
        self._known: dict[int, tuple[ref[Tensor], Value, int]] = {}
        """The value of each tensor that lives, by the tensor's id, with its address."""
        self._held: dict[int, list[tuple[ref[Value], ref[Tensor]]]] = {}
        """Values that are held, by storage: copied before the storage changes."""
        self.unwritten: dict[int, tuple[ref[Tensor], Any]] = {}
        """Memory that may not be filled yet, by the tensor's id, with the op that made it: Note
        [When unwritten memory is held]."""
        self.fresh: list[tuple[Tensor, Value, Any, Hooks | None, bool]] = []
        """What the last op made and is to be held: autograd has not marked it yet."""
        self._later: list[tuple[Tensor, ref[Value], Any, Hooks]] = []
        """What a tier is to hold: handed to it at the end, when it is known who needs it."""
        self.just_saved: set[Value] = set()
        """What autograd saved since the last op: Note [What an op saves before it runs]."""
        self._many = _MANY
        self._under_autocast = any_autocast()  # where ops are recorded, it is off

    def find(self, tensor: Tensor) -> Value | None:
        """The value of a tensor, if the region has met it and it still has the same memory."""
        found = self._known.get(id(tensor))
        if found is not None and found[0]() is tensor and found[2] == _address(tensor):
            return found[1]
        return None

    def value_of(self, tensor: Tensor) -> Value:
        """The value of a tensor; one that the region did not make is held as it is."""
        value = self.find(tensor)
        if value is None:
            parameter = cast_parameter(tensor) if self._under_autocast else None
            if parameter is not None:
                return self._cast_of(parameter, tensor)
            value = Value(None)
            if self._is_replayed is not None and self._is_replayed(tensor):
                value.needs_replay = True
                self.enter(tensor, value)
            elif self.is_unwritten(tensor):
                self.hold(tensor, value, self.unwritten.pop(id(tensor))[1])
            elif _may_be_a_buffer(tensor):
                value.hold(Held(copy_of(tensor), None, self._hooks))
                self.enter(tensor, value)
            else:
                self.hold(tensor, value, None)
        return value

    def _cast_of(self, parameter: nn.Parameter, cast: Tensor) -> Value:
        """The value of a cast of a parameter from outside the region: it is made again."""
        source = self.value_of(parameter)
        call = Call(CAST, (source,), {"dtype": cast.dtype}, [source])
        value = Value(call)
        value.is_fixed = True
        call.outs.append(ref(value))
        self.enter(cast, value)
        return value

    def leave_unwritten(self, tensors: Iterable[Tensor], maker: Any) -> None:
        """An op made memory that is yet to be filled, or views of such memory.

        Note [When unwritten memory is held]. Hooks around the region may copy what they are given,
        or begin to, and an op or a kernel that no dispatcher sees may fill the memory long after it
        was made. So it is held, and handed to the hooks, when an op uses it or autograd saves it.
        The op that autograd saves it for may be the one that fills it, as `rrelu` does its noise:
        hooks that copy have to wait until that op has returned.
        """
        for tensor in tensors:
            self.unwritten[id(tensor)] = ref(tensor), maker

    def is_unwritten(self, tensor: Any) -> bool:
        """Whether a tensor shows memory that was made to be filled, and nothing has used it yet."""
        found = self.unwritten.get(id(tensor))
        return found is not None and found[0]() is tensor

    def is_fixed(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or parameters alone decide it."""
        found = self._known.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1].is_fixed
        return is_parameter(tensor)

    def noted(self, args: Any, inputs: list[Value]) -> Any:
        """Arguments of an op with values in place of tensors; these are added to the inputs."""
        noted = []
        for arg in args:
            if isinstance(arg, Tensor):
                found = self._known.get(id(arg))
                if (
                    found is not None
                    and found[0]() is arg
                    and (not found[2] or found[2] == arg.data_ptr())
                ):
                    value = found[1]
                else:
                    value = self.value_of(arg)
                inputs.append(value)
                noted.append(value)
            elif type(arg) is list or type(arg) is tuple:
                noted.append(self.noted(arg, inputs))
            else:
                noted.append(arg)
        return tuple(noted) if type(args) is tuple else noted

    def noted_kwargs(self, kwargs: dict[str, Any], inputs: list[Value]) -> dict[str, Any]:
        """The same for keyword arguments."""
        return dict(zip(kwargs, self.noted(list(kwargs.values()), inputs), strict=True))

    def enter(self, tensor: Tensor, value: Value) -> None:
        """A tensor has this value."""
        self._known[id(tensor)] = ref(tensor), value, _address(tensor)

    def hold(self, tensor: Tensor, value: Value, maker: Any) -> None:
        """Hold a tensor that autograd has marked; the model holds a parameter anyway.

        Any other goes through the hooks, leaf or not: in the replay of a region around, whose
        arguments came back from hooks, they are leaves that were none in its forward, and that
        region counts what it is given.
        """
        value.is_fixed = is_parameter(tensor)
        value.hold(Held(tensor, maker, None if value.is_fixed else self._hooks))
        self._enter_held(tensor, value)

    def hold_soon(
        self,
        tensor: Tensor,
        value: Value,
        maker: Any,
        hooks: Hooks | None,
        at_once: bool = False,
    ) -> None:
        """Hold a tensor that an op has just made; `at_once`, whether or not it will be needed."""
        self.fresh.append((tensor, value, maker, hooks, at_once))
        self._enter_held(tensor, value)

    def _enter_held(self, tensor: Tensor, value: Value) -> None:
        self.enter(tensor, value)
        self._held.setdefault(_storage(tensor), []).append((ref(value), ref(tensor)))
        if len(self._known) > self._many:  # else kept results that nobody needs would stay
            self._known = {k: known for k, known in self._known.items() if known[0]() is not None}
            self._many = 2 * len(self._known) + _MANY

    def settle(self) -> None:
        """Hand what the last op made to whoever holds it: by now autograd has marked it."""
        fresh, self.fresh = self.fresh, []
        for tensor, value, maker, hooks, at_once in fresh:
            # The hooks around it are perhaps those of a region that counts.
            if hooks is None or hooks is self._hooks or at_once:
                value.hold(Held(tensor, maker, hooks))
            else:
                self._later.append((tensor, ref(value), maker, hooks))

    def is_to_be_held(self, value: Value) -> bool:
        """Whether a value's decision is decided, though it is not held yet."""
        return any(value is fresh for _, fresh, *_ in self.fresh) or any(
            value is weak() for _, weak, _, _ in self._later
        )

    def held_values(self) -> list["ref[Value]"]:
        """Everything that was held, whether or not anything needs it."""
        return [value for values in self._held.values() for value, _ in values]

    def close(self, failed: bool) -> None:
        """The forward is over: only what autograd saved keeps values alive."""
        self.settle()
        later, self._later = self._later, []
        self._is_replayed = None
        self.just_saved.clear()
        self._known.clear()
        self.unwritten.clear()
        self._held.clear()
        value: Value | None = None
        for _, weak, _, _ in later:
            value = weak()
            if value is not None:
                value.maker = None  # else one that is not needed would have others held
        del value
        while later and not failed:
            tensor, weak, maker, hooks = later.pop(0)
            value = weak()
            if value is not None:
                value.hold(Held(tensor, maker, hooks))

    def will_change(self, tensors: list[Tensor]) -> set[int]:
        """Copy what is held, or is to be, of tensors that are about to change; their storages.

        Note [What an op saves before it runs]. Autograd saves an op's arguments just before the op.
        One that the op then changes is either a result that it fills (`rrelu`'s noise), or a
        mistake that the version counter tells of: both want the tensor itself, and no copy. What a
        region hands on to the one around it at other times was there before, and is copied.
        """
        keys = {_storage(tensor) for tensor in tensors}
        if keys:
            keys.add(_OF_SEVERAL)  # of which they may be a part
        self._later = [
            (copy_of(x) if _storage(x) in keys else x, weak, maker, hooks)
            for x, weak, maker, hooks in self._later
        ]
        for key in keys:
            for weak, given in self._held.pop(key, ()):
                value = weak()
                if value is None or value.held is None or value in self.just_saved:
                    continue
                copied = value.held.copied(given(), self._hooks)
                if copied is not None:
                    value.hold(copied)
        return keys

    def has_changed(self, tensors: list[Tensor], keys: set[int]) -> None:
        """These tensors, and all that share their storages, have other values now."""
        for tensor in tensors:
            self._known.pop(id(tensor), None)
        for number, known in list(self._known.items()):
            tensor_now = known[0]()
            if tensor_now is None or _storage(tensor_now) in keys:
                del self._known[number]
        for number, unwritten in list(self.unwritten.items()):
            tensor_now = unwritten[0]()
            if tensor_now is None or _storage(tensor_now) in keys:
                del self.unwritten[number]


def _address(tensor: Tensor) -> int:
    """Where a plain tensor's memory begins; 0 for others."""
    if type(tensor) is not Tensor:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # sparse, or nothing behind it
        return 0


_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_OF_SEVERAL, _UNKNOWN = 0, 1


def _storage(tensor: Tensor) -> int:
    """What tells whether tensors share memory.

    Of those made of several tensors (sparse, nested), and of subclasses, nobody knows: any may
    share memory with any.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return _OF_SEVERAL
    if type(tensor) not in _PLAIN:
        return _UNKNOWN
    return storage_key(tensor.untyped_storage())


def _may_be_a_buffer(tensor: Tensor) -> bool:
    """Whether a tensor from outside may change until backward, and is cheap to copy.

    Statistics, counters, scales: another forward changes them, some kernels without moving their
    version. A large one that changes is an error, which says so.
    """
    if tensor.requires_grad or not _is_plain(tensor) or tensor.layout is not torch.strided:
        return False
    return 0 < nbytes_of(tensor) <= _SMALL


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is a tensor and nothing more, or the fake of one."""
    kind = type(tensor)
    return kind is Tensor or (kind is FakeTensor and not isinstance(tensor, nn.Parameter))
