"""The modules a region runs: buffers end a step as without a replay, modes are as in forward.

Note [Buffers are replayed from what they were]. A module that changes a buffer (BatchNorm's running
statistics, a power iteration, an expert-load counter) would change it a second time in replay, and
would replay from the changed value. So a replay runs on stand-ins: copies of the buffers as they
were before the forward, swapped in for the replay and thrown away after. Version counters do not
tell all that changes: kernels of the batch-norm family write behind their back, and so does code
that goes through `.data`. So buffers are copied before the forward. Small ones on the CPU always;
the others when a module is seen for the first time in this mode (training or not) and in the reach
of this function, which may run it or not: its content is compared once, and from then on only if it
did change. A buffer that changes for the first time later is replayed from its new value, with a
warning.

Note [Buffers that hold what they held]. To replay on stand-ins takes longer than to look whether
they are needed. Small buffers on the CPU that are the same objects at the same versions and with
the same content as before the forward were not changed by it, and so will not be by a replay, which
runs the same ops: it runs on the buffers themselves. A forward may have written to a buffer behind
its version counter and undone that later; a replay that ends on the way would not. So after such a
replay the buffers are compared once more, and written to if they differ.

Note [Parameters that were lent]. `torch.func.functional_call` puts tensors in the place of a
module's parameters for the time of a call, and the replay comes after it. A plain tensor in such a
place is an argument of the region like any other: it is held, and put there again.
"""

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rekindle.regions.recompute import module_attributes
from rekindle.torch_private.cuda import is_capturing
from rekindle.torch_private.dispatch_modes import dispatch_modes, past_modes
from rekindle.torch_private.fake_mode import FakeTensor
from rekindle.torch_private.version_counters import version_of

_SMALL = 1 << 16
_ENOUGH = 8
"""A module whose buffers did not change in so many uses is taken for one that does not."""
_LAZY = (UninitializedBuffer, UninitializedParameter)
_PLAIN_BUFFERS = frozenset((Tensor, type(None)))
"""Types of buffers that can be compared without running anybody's code."""

_Buffers: TypeAlias = dict[str, Tensor | None]
_Use: TypeAlias = tuple[Any, bool]
"""Which function ran with a module in its reach, and in which mode the module was."""
_NOTHING_KNOWN: dict[_Use, bool] = {}
_changes: WeakKeyDictionary[nn.Module, dict[_Use, bool]] = WeakKeyDictionary()
"""Modules with costly buffers that ran in a region before: by use, did they ever change one?"""
_exchanging: WeakSet[nn.Module] = WeakSet()
"""First modules of regions whose parameters' data were exchanged before a replay ended. See Note
[A replay that runs to its end] in collect.py."""


class ModuleState:
    """Modes, buffers and lent parameters of a region's modules, as its forward found them."""

    __slots__ = (
        "_attributes",
        "_before",
        "_has_stand_ins",
        "_lent",
        "_modules",
        "_runs_on_buffers",
        "_training",
        "_watched",
    )

    def __init__(self, modules: list[nn.Module], function: Any) -> None:
        self._modules = modules
        use: Any = None
        self._training = [module.training for module in modules]
        self._attributes = module_attributes.attributes_of(modules, function)
        """Note [Attributes that a forward assigns]."""
        self._has_stand_ins = self._runs_on_buffers = False
        self._before: list[_BufferState] = []
        self._watched: list[_BufferState] = []
        self._lent: list[tuple[nn.Module, dict[str, Any]]] = []
        for module in modules:
            if module._buffers:
                use = use or _use_of(function)
                self._watched.append(_BufferState(module, use))
            own = module._parameters
            if own and Tensor in map(type, own.values()):  # Note [Parameters that were lent]
                self._lent.append((module, dict(own)))

    def close(self) -> None:
        """The forward has ended: keep what a replay is to start from, drop the rest."""
        own = [module for module in self._modules if module._buffers]
        if own:
            known = {watched.module for watched in self._watched}
            self._before = [watched for watched in self._watched if watched.may_have_changed()]
            for module in own:
                if module not in known:  # its first buffer was made just now
                    self._before.append(_BufferState(module, None, {}))
        self._watched = []
        if self._attributes is not None and not self._attributes.close():
            self._attributes = None

    def note_exchange(self) -> None:
        """Remember that a parameter's data were exchanged before a replay had ended."""
        _exchanging.add(self._modules[0])

    def exchanges_data(self) -> bool:
        """True if `note_exchange` was called in a replay of these modules."""
        return self._modules[0] in _exchanging

    def has_stand_ins(self) -> bool:
        """True if the last replay ran on copies of buffers."""
        return self._has_stand_ins

    def is_as_before(self) -> bool:
        """True if a replay finds everything as the forward did, and will leave it so.

        Note [Buffers that hold what they held].
        """
        self._has_stand_ins = self._runs_on_buffers = False
        if self._watched or self._lent or self._attributes is not None:
            return False
        if self._before and not all(watched.holds_what_it_held() for watched in self._before):
            return False
        is_same = self._training == [module.training for module in self._modules]
        self._runs_on_buffers = is_same and bool(self._before)
        return is_same

    def restore_buffers(self) -> None:
        """Undo writes to buffers by a replay that ran on them and ended before its function did."""
        if self._runs_on_buffers:
            for watched in self._before:
                watched.restore()

    def now(self) -> "_ReplacedState":
        """The state that `enter` replaces, to be put back after a replay."""
        return _ReplacedState(
            [module.training for module in self._modules],
            [(watched.module, dict(watched.module._buffers)) for watched in self._changing()],
            [(module, dict(module._parameters)) for module, _ in self._lent],
            [] if self._attributes is None else self._attributes.now(),
        )

    def enter(self) -> None:
        """Set modes, buffers, lent parameters and attributes to what the forward found."""
        copies: dict[int, Tensor] = {}  # modules may share a buffer
        _set_modes(self._modes_and(self._training))
        changing = self._changing()
        self._has_stand_ins = bool(changing)
        for watched in changing:
            _replace(watched.module._buffers, watched.stand_ins(copies))
        for module, lent in self._lent:
            _replace(module._parameters, lent)
        if self._attributes is not None:
            self._attributes.enter()

    def put_back(self, now: "_ReplacedState") -> None:
        """Undo `enter`, however far it has come."""
        _set_modes(self._modes_and(now.modes))
        for module, buffers in now.buffers:
            _replace(module._buffers, buffers)
        for module, parameters in now.parameters:
            _replace(module._parameters, parameters)
        module_attributes.put_back(now.attributes)

    def _changing(self) -> "list[_BufferState]":
        return self._before or self._watched  # the latter for a replay while the forward runs

    def _modes_and(self, modes: list[bool]) -> Iterable[tuple[nn.Module, bool]]:
        return zip(self._modules, modes, strict=True)


class _ReplacedState(NamedTuple):
    """Modes, buffers, parameters and attributes that a replay replaces, as they were before it."""

    modes: list[bool]
    buffers: list[tuple[nn.Module, dict[str, Any]]]
    parameters: list[tuple[nn.Module, dict[str, Any]]]
    attributes: list[module_attributes.Attribute]


def _use_of(function: Any) -> Any:
    """A key for uses of a module: the function that reaches it, and what that function holds."""
    if isinstance(function, partial):
        return _use_of(function.func), tuple(map(_use_of, function.args))
    code = getattr(function, "__code__", None)
    if code is None:
        return id(function) if callable(function) else type(function)
    held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    owner = getattr(function, "__self__", None)
    return code, id(owner), tuple(map(_held_use, held))


def _held_use(held: Any) -> Any:
    if isinstance(held, Tensor):
        return Tensor
    if isinstance(held, tuple):
        return tuple(map(_held_use, held))
    return id(held)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training is not training:
            module.training = training


def _replace(old: dict[str, Any], new: dict[str, Any]) -> None:
    old.clear()
    old.update(new)


class _BufferState:
    """The buffers of one module before a forward, and copies of those that may change.

    Note [Buffers are replayed from what they were].
    """

    __slots__ = ("_buffers", "_copies", "_costly", "_known", "_use", "_versions", "module")

    def __init__(self, module: nn.Module, use: Any, buffers: _Buffers | None = None) -> None:
        self.module = module
        self._use = use, module.training
        self._buffers = dict(module._buffers) if buffers is None else buffers
        self._costly = [_is_costly(buffer) for buffer in self._buffers.values()]
        self._known: bool | None = None
        if any(self._costly):
            uses = _changes.get(module, _NOTHING_KNOWN)
            self._known = uses.get(self._use)
            if self._known is None and len(uses) >= _ENOUGH and not any(uses.values()):
                self._known = False
        self._versions = [_version(buffer) for buffer in self._buffers.values()]
        self._copies: dict[str, Tensor] = {}
        if self._known is not False or not all(self._costly):
            for (name, buffer), costly in zip(self._buffers.items(), self._costly, strict=True):
                if buffer is None or type(buffer) in _LAZY or (costly and self._known is False):
                    continue
                self._copies[name] = copy_of(buffer)

    def may_have_changed(self) -> bool:
        """True if the forward may have changed a buffer; called once, when it has ended."""
        changed = self._looks_changed()
        if any(self._costly):
            changed = changed or (self._known is None and self._has_other_content())
            if changed and self._known is False:
                warnings.warn(
                    f"A buffer of {type(self.module).__name__} changed in a region for the first "
                    "time in a while: this once, the region is replayed from its new value.",
                    stacklevel=2,
                )
            if changed is not self._known and not self._known and not self._is_fake():
                _changes.setdefault(self.module, {})[self._use] = changed
        return changed or bool(self._known) or not all(self._costly)

    def _looks_changed(self) -> bool:
        now = self.module._buffers
        if len(now) != len(self._buffers):
            return True
        for name, buffer in self._buffers.items():
            if now.get(name) is not buffer:
                return True
        return self._versions != [_version(buffer) for buffer in self._buffers.values()]

    def holds_what_it_held(self) -> bool:
        """True if the buffers are those of before the forward, unchanged, and small to compare."""
        if any(self._costly) or self._looks_changed():
            return False
        kinds = set(map(type, self._buffers.values()))
        return kinds <= _PLAIN_BUFFERS and past_modes(self._equals_copies)

    def restore(self) -> None:
        """Write the content of before the forward to the buffers, if they have another now."""
        if not past_modes(self._equals_copies):
            past_modes(self._copy_back)

    def _copy_back(self) -> None:
        for name, copy in self._copies.items():
            buffer = self._buffers[name]
            if buffer is not None:
                buffer.data.copy_(copy)  # the version counter stays, as for the write it undoes

    def _has_other_content(self) -> bool:
        """Compare with the copies; this waits for the device, once in a module's life."""
        if is_capturing():
            return True
        if self._is_fake():  # then there is no content, and nothing to be learnt
            return False
        return not past_modes(self._equals_copies)

    def _equals_copies(self) -> bool:
        return all(
            torch.equal(copy.detach(), buffer.detach())
            for name, copy in self._copies.items()
            if (buffer := self._buffers[name]) is not None
        )

    def _is_fake(self) -> bool:
        return any(isinstance(buffer, FakeTensor) for buffer in self._buffers.values())

    def stand_ins(self, copies: dict[int, Tensor]) -> _Buffers:
        """Buffers to replay with: as they were, or as they are now where there is no copy."""
        return {
            name: self._stand_in(name, buffer, copies) for name, buffer in self._buffers.items()
        }

    def _stand_in(
        self, name: str, buffer: Tensor | None, copies: dict[int, Tensor]
    ) -> Tensor | None:
        if buffer is None:
            return None
        if id(buffer) not in copies:
            copies[id(buffer)] = copy_of(self._copies.get(name, buffer))
        return copies[id(buffer)]


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None or type(buffer) in _LAZY else version_of(buffer)


def _is_costly(buffer: Tensor | None) -> bool:
    """True if a buffer is too large, or too far, to be copied at every call."""
    return (
        buffer is not None
        and type(buffer) not in _LAZY
        and (buffer.nbytes > _SMALL or not buffer.is_cpu)
    )


def copy_of(buffer: Tensor) -> Tensor:
    """A copy with no graph behind it, that wants a gradient if the original does."""
    if not (buffer.requires_grad or dispatch_modes()):
        return buffer.clone()
    return past_modes(lambda: buffer.detach().clone().requires_grad_(buffer.requires_grad))
