"""The tensors of a region that is being recorded: which value each has, and what is held.

Note [States of a tensor]. A tensor that the table knows is *unwritten*, or has a value. A value is

- *recomputable*: its op makes it again (`RecordedValue.op`);
- *pending*: to be held, once its op has ended (`hold_pending`), or, if a tier is to have it, at the
  end of the region, when it is known who needs it (`close`);
- *held*: `RecordedValue.held` has the tensor;
- *replayed*: compiled code made it, and a replay of the region makes it again (`needs_replay`).

Tensors are known by their identity, and as long as they have the memory they had: what an op
changes in place, or exchanges, gets another value, and what was held of it is copied before.

Note [When an op has ended]. The recorder runs below autograd, which sets `requires_grad` and
`grad_fn` of a result only after the dispatcher has returned. Hooks that get a result before that
see a leaf, and may treat it as one. So a result is held when the next op begins.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn

from rekindle.regions.selective.autocast_casts import CAST, cast_parameter
from rekindle.regions.selective.held_tensor import HeldTensor, Hooks, copy_of, nbytes_of
from rekindle.regions.selective.op_addresses import is_parameter
from rekindle.regions.selective.op_graph import RecordedOp, RecordedValue
from rekindle.regions.selective.op_kinds import OpTraits
from rekindle.torch_private.autocast import any_autocast
from rekindle.torch_private.fake_mode import FakeTensor
from rekindle.torch_private.storages import storage_key

_SMALL_BYTES = 1 << 18
_CAST_TRAITS = OpTraits(CAST)
_MANY_ENTRIES = 16
NO_TENSORS = frozenset(
    [int, float, bool, str, list, type(None), torch.dtype, torch.device, torch.layout]
)
"""Types of most arguments that are no tensors: `isinstance` takes five times as long to tell."""

_Entry: TypeAlias = tuple["ref[Tensor]", RecordedValue | None, Any]
"""A tensor, its value, and the address of its memory; of an unwritten tensor: the tensor, None, and
the op that made it. A plain tuple: one is made for every tensor of a region."""


class _Pending:
    """A tensor that is to be held."""

    __slots__ = ("at_once", "hooks", "made_by", "tensor", "value")

    def __init__(
        self, tensor: Tensor, value: RecordedValue, made_by: Any, hooks: Hooks | None, at_once: bool
    ) -> None:
        self.tensor = tensor
        self.value = value
        self.made_by = made_by
        self.hooks = hooks
        self.at_once = at_once


class _PendingAtEnd:
    """A tensor that a tier is to hold, if anything still needs its value at the region's end."""

    __slots__ = ("hooks", "made_by", "tensor", "value")

    def __init__(self, pending: _Pending, hooks: Hooks) -> None:
        self.tensor = pending.tensor
        self.value = ref(pending.value)
        self.made_by = pending.made_by
        self.hooks = hooks


class TensorTable:
    """The tensors of one region: Note [States of a tensor]."""

    def __init__(
        self, hooks: Hooks | None, is_replayed: Callable[[Tensor], bool] | None = None
    ) -> None:
        self._hooks = hooks
        """The saved-tensor hooks around the region, which get to see what is kept."""
        self.hooks_of_input: tuple[int, Hooks | None] | None = None
        """The id of the region's input, which the caller holds, and the hooks that are to hold it;
        None if it goes through those around the region, as others do."""
        self._is_replayed = is_replayed
        """Returns whether compiled code in the region made a tensor; None if there is no such."""
        self._entries: dict[int, _Entry] = {}
        """Entries of the tensors that live, by the tensor's id."""
        self._entries_limit = _MANY_ENTRIES
        """Number of entries from which those of dead tensors are dropped."""
        self._holdings: dict[int, list[tuple[ref[RecordedValue], ref[Tensor]]]] = {}
        """Values that are held or pending, by storage: copied before the storage changes."""
        self.pending: list[_Pending] = []
        """Results of the last op that are to be held: Note [When an op has ended]."""
        self._pending_at_end: list[_PendingAtEnd] = []
        self.just_saved: set[RecordedValue] = set()
        """Values that autograd saved since the last op: Note [What an op saves before it runs]."""
        self.has_unwritten = False
        """True if there has been an unwritten tensor."""
        self._under_autocast = any_autocast()  # where ops are recorded, it is off

    def __len__(self) -> int:
        """Number of entries, some of them perhaps of tensors that are gone."""
        return len(self._entries)

    def find(self, tensor: Tensor) -> RecordedValue | None:
        """The value of a tensor, if the region has met it and it still has the same memory."""
        found = self._entries.get(id(tensor))
        if (
            found is None
            or found[0]() is not tensor
            or (found[2] and (type(tensor) is not Tensor or found[2] != tensor.data_ptr()))
        ):
            return None
        return found[1]

    def value_of(self, tensor: Tensor) -> RecordedValue:
        """The value of a tensor; one that the region did not make is held as it is."""
        value = self.find(tensor)
        if value is not None:
            return value
        if type(tensor) is nn.Parameter:  # as below, which most of them need not ask
            value = RecordedValue(None)
            self.hold(tensor, value, None)
            return value
        parameter = cast_parameter(tensor) if self._under_autocast else None
        if parameter is not None:
            return self._value_of_cast(parameter, tensor)
        value = RecordedValue(None)
        if self._is_replayed is not None and self._is_replayed(tensor):
            value.needs_replay = True
            self.set_value(tensor, value)
        elif self.is_unwritten(tensor):
            _, _, made_by = self._entries[id(tensor)]
            self.hold(tensor, value, made_by)
        elif _may_be_a_buffer(tensor):
            value.hold(HeldTensor(copy_of(tensor), None, self._hooks))
            self.set_value(tensor, value)
        else:
            self.hold(tensor, value, None)
        return value

    def _value_of_cast(self, parameter: nn.Parameter, cast: Tensor) -> RecordedValue:
        """The value of a cast of a parameter from outside the region: it is made again."""
        source = self.value_of(parameter)
        op = RecordedOp(_CAST_TRAITS, (source,), (), {"dtype": cast.dtype}, is_flat=True)
        value = RecordedValue(op)
        value.from_parameters = True
        op.outputs.append(ref(value))
        self.set_value(cast, value)
        return value

    def set_value(self, tensor: Tensor, value: RecordedValue) -> None:
        """Enter a tensor with its value."""
        try:
            address = tensor.data_ptr() if type(tensor) is Tensor else 0
        except RuntimeError:  # sparse, or nothing behind it
            address = 0
        self._entries[id(tensor)] = ref(tensor), value, address

    def values_of(self, args: tuple[Any, ...]) -> list[RecordedValue] | None:
        """The values of an op's arguments, if all of them are tensors."""
        entries = self._entries
        values = []
        for arg in args:
            entry: Any = entries.get(id(arg))
            if (  # as `find`
                entry is None
                or entry[0]() is not arg
                or (value := entry[1]) is None
                or (entry[2] and (type(arg) is not Tensor or entry[2] != arg.data_ptr()))
            ):
                if not isinstance(arg, Tensor):
                    return None
                value = self.value_of(arg)
            values.append(value)
        return values

    def values_for(self, args: Any, inputs: list[RecordedValue]) -> Any:
        """Arguments of an op with values in place of tensors; the values are added to `inputs`."""
        found = []
        for arg in args:
            kind = type(arg)
            if kind is Tensor or (kind not in NO_TENSORS and isinstance(arg, Tensor)):
                value = self.value_of(arg)
                inputs.append(value)
                found.append(value)
            elif kind is list or kind is tuple:
                found.append(self.values_for(arg, inputs))
            else:
                found.append(arg)
        return tuple(found) if type(args) is tuple else found

    def values_for_kwargs(
        self, kwargs: dict[str, Any], inputs: list[RecordedValue]
    ) -> dict[str, Any]:
        """Keyword arguments of an op with values in place of tensors."""
        return dict(zip(kwargs, self.values_for(list(kwargs.values()), inputs), strict=True))

    def is_from_parameters(self, tensor: Tensor) -> bool:
        """True if a tensor is a parameter, or parameters alone decide its content."""
        found = self._entries.get(id(tensor))
        if found is not None and found[0]() is tensor and found[1] is not None:
            return found[1].from_parameters
        return is_parameter(tensor)

    def add_unwritten(self, tensors: Iterable[Tensor], made_by: Any) -> None:
        """Enter memory that an op made to be filled, or views of such memory.

        Note [When unwritten memory is held]. Hooks around the region may copy what they are given,
        or begin to, and an op or a kernel that no dispatcher sees may fill the memory long after it
        was made. So it is held, and handed to the hooks, when an op uses it or autograd saves it.
        The op that autograd saves it for may be the one that fills it, as `rrelu` does its noise:
        hooks that copy have to wait until that op has returned.
        """
        self.has_unwritten = True
        for tensor in tensors:
            self._entries[id(tensor)] = ref(tensor), None, made_by

    def is_unwritten(self, tensor: Any) -> bool:
        """True if a tensor shows memory that was made to be filled, and nothing has used it yet."""
        found = self._entries.get(id(tensor))
        return found is not None and found[1] is None and found[0]() is tensor

    def hold(self, tensor: Tensor, value: RecordedValue, made_by: Any) -> None:
        """Hold a tensor whose op has ended; the model holds a parameter anyway.

        Any other goes through the hooks, leaf or not: in the replay of a region around, whose
        arguments came back from hooks, they are leaves that were none in its forward, and that
        region counts what it is given.
        """
        value.from_parameters = is_parameter(tensor)
        hooks = None if value.from_parameters else self._hooks
        if self.hooks_of_input is not None and self.hooks_of_input[0] == id(tensor):
            hooks = self.hooks_of_input[1]
        value.hold(HeldTensor(tensor, made_by, hooks))
        self._enter_holding(tensor, value)

    def hold_after_op(
        self,
        tensor: Tensor,
        value: RecordedValue,
        made_by: Any,
        hooks: Hooks | None,
        at_once: bool = False,
    ) -> None:
        """Hold a result of the op that runs now when that op has ended.

        `at_once`: a tier gets it then, and not at the region's end, needed or not.
        """
        self.pending.append(_Pending(tensor, value, made_by, hooks, at_once))
        self._enter_holding(tensor, value)

    def _enter_holding(self, tensor: Tensor, value: RecordedValue) -> None:
        self.set_value(tensor, value)
        entries = self._entries
        weak = entries[id(tensor)][0]
        self._holdings.setdefault(_storage(tensor), []).append((ref(value), weak))
        if len(entries) > self._entries_limit:  # else unneeded kept results would stay
            for key in [key for key, entry in entries.items() if entry[0]() is None]:
                del entries[key]
            self._entries_limit = 2 * len(entries) + _MANY_ENTRIES

    def hold_pending(self) -> None:
        """Hold the results of the last op that are to be held: Note [When an op has ended]."""
        pending, self.pending = self.pending, []
        for each in pending:
            # The hooks around the region are perhaps those of a region that counts.
            if each.hooks is None or each.hooks is self._hooks or each.at_once:
                each.value.hold(HeldTensor(each.tensor, each.made_by, each.hooks))
            else:
                self._pending_at_end.append(_PendingAtEnd(each, each.hooks))

    def is_pending(self, value: RecordedValue) -> bool:
        """True if a value is to be held, and is not yet."""
        return any(value is each.value for each in self.pending) or any(
            value is each.value() for each in self._pending_at_end
        )

    def held_values(self) -> list["ref[RecordedValue]"]:
        """Every value that was held, whether or not anything needs it."""
        return [value for values in self._holdings.values() for value, _ in values]

    def close(self, failed: bool) -> None:
        """End the region: from now on only what autograd saved keeps values alive."""
        self.hold_pending()
        pending, self._pending_at_end = self._pending_at_end, []
        self._is_replayed = None
        self.just_saved.clear()
        self._entries.clear()
        self._holdings.clear()
        value: RecordedValue | None = None
        for each in pending:
            value = each.value()
            if value is not None:
                value.op = None  # else one that is not needed would have others held
        del value
        while pending and not failed:
            each = pending.pop(0)
            value = each.value()
            if value is not None:
                value.hold(HeldTensor(each.tensor, each.made_by, each.hooks))

    def copy_before_change(self, tensors: list[Tensor]) -> set[int]:
        """Copy what is held or pending of tensors that are about to change; keys of their storages.

        Note [What an op saves before it runs]. Autograd saves an op's arguments just before the op.
        One that the op then changes is either a result that it fills (`rrelu`'s noise), or a
        mistake that the version counter reports: both want the tensor itself, and no copy. What a
        region hands on to the one around it at other times was there before, and is copied.
        """
        keys = {_storage(tensor) for tensor in tensors}
        if keys:
            keys.add(_OF_SEVERAL)  # of which they may be a part
        for each in self._pending_at_end:
            if _storage(each.tensor) in keys:
                each.tensor = copy_of(each.tensor)
        for key in keys:
            for weak, given in self._holdings.pop(key, ()):
                value = weak()
                if value is None or value.held is None or value in self.just_saved:
                    continue
                copied = value.held.copied(given(), self._hooks)
                if copied is not None:
                    value.hold(copied)
        return keys

    def forget_changed(self, tensors: list[Tensor], keys: set[int]) -> None:
        """Forget the values of tensors that an op changed, and of all that share their storages."""
        for tensor in tensors:
            self._entries.pop(id(tensor), None)
        for key, entry in list(self._entries.items()):
            tensor_now = entry[0]()
            if tensor_now is None or _storage(tensor_now) in keys:
                del self._entries[key]


_ONE_STORAGE = frozenset([Tensor, nn.Parameter, FakeTensor])
"""Types of tensors that, if strided and not nested, have one storage which can be asked for."""
_OF_SEVERAL = 0
"""The key of tensors that consist of several tensors: any tensor may be a part of one."""
_UNKNOWN = 1
"""The key of subclasses, whose storage is not known."""


def _storage(tensor: Tensor) -> int:
    """A key that tensors have in common if they share memory.

    Of those made of several tensors (sparse, nested), and of subclasses, nobody knows: any may
    share memory with any.
    """
    if type(tensor) not in _ONE_STORAGE:
        is_one = tensor.layout is torch.strided and not tensor.is_nested
        return _UNKNOWN if is_one else _OF_SEVERAL
    if tensor.layout is not torch.strided or tensor.is_nested:
        return _OF_SEVERAL
    return storage_key(tensor.untyped_storage())


def _may_be_a_buffer(tensor: Tensor) -> bool:
    """True if a tensor from outside may change until backward, and is cheap to copy.

    Statistics, counters, scales: another forward changes them, some kernels without moving their
    version. A large one that changes is an error, which says so.
    """
    if tensor.requires_grad or not _is_plain(tensor) or tensor.layout is not torch.strided:
        return False
    return 0 < nbytes_of(tensor) <= _SMALL_BYTES


def _is_plain(tensor: Tensor) -> bool:
    """True for a tensor of no subclass, or the fake of one."""
    kind = type(tensor)
    return kind is Tensor or (kind is FakeTensor and not isinstance(tensor, nn.Parameter))
