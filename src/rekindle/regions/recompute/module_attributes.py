"""Tensors that modules keep in plain attributes, as a recurrent state or a cache of keys.

Note [Attributes that a forward assigns]. A replay would find what the forward left there, and
assign it once more. So the attributes that methods of a module's class assign by name are recorded
before the forward, if they hold a tensor, a tuple or nothing. Those that hold another tensor after
it are put back for the replay, and afterwards to what they were before it. Most classes assign none
outside `__init__`, which is looked up once per class. Numbers, lists and objects are left alone:
code counts its own runs with them.
"""

import dis
import functools
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from rekindle.regions.recompute.call_state import CallState
from rekindle.regions.recompute.containers import AsItIs
from rekindle.regions.recompute.packing import Packing
from rekindle.regions.recompute.random_generators import is_of_a_library
from rekindle.regions.recompute.unpacking import Rebuilding, matches

_ABSENT = object()
"""In place of an attribute that is not there."""
_names: dict[int, tuple["ref[type]", tuple[str, ...]]] = {}
"""The attributes that the methods of a class assign, by the id of the class."""
_assigning_nothing: set[int] = set()
"""The ids of classes whose methods assign none."""

Attribute = tuple[nn.Module, str, Any]
"""A module, the name of an attribute, and its value or what was packed of it."""


def attributes_of(modules: list[nn.Module], function: Any) -> "AttributeState | None":
    """Attributes that a forward of these modules may assign tensors to; None if there are none."""
    if _assigning_nothing.issuperset(map(id, map(type, modules))):
        return None
    found = [
        (module, name, value)
        for module in modules
        for name in _assigned_by(type(module))
        if _is_noted(value := module.__dict__.get(name, _ABSENT))
    ]
    return AttributeState(found, function) if found else None


class AttributeState:
    """Attributes of modules as a region's forward found them."""

    __slots__ = ("_attributes", "_is_closed", "_state")

    def __init__(self, found: list[Attribute], function: Any) -> None:
        packing = Packing(None, lambda _: None, function, ((), {}), keep_graphs=False)
        self._attributes: list[Attribute] = [
            (module, name, packing.pack_state(value, (None, "attribute", name)))
            if isinstance(value, Tensor | tuple)
            else (module, name, AsItIs(value))
            for module, name, value in found
        ]
        self._state = CallState(function, packing, None)
        self._is_closed = False

    def close(self) -> bool:
        """The forward has ended: keep the attributes that it changed; False if there are none."""
        self._attributes = list(self._changed())
        self._is_closed = True
        self._state.close()
        return bool(self._attributes)

    def _changed(self) -> Iterator[Attribute]:
        for module, name, packed in self._attributes:
            now = module.__dict__.get(name, _ABSENT)
            if isinstance(packed, AsItIs):
                if packed.value is not now and _holds_tensor(now):
                    yield module, name, packed
            elif _is_noted(now) and not matches(packed, now, []):
                yield module, name, packed

    def now(self) -> list[Attribute]:
        """The attributes as they are now, to be put back after a replay."""
        changing = self._attributes if self._is_closed else self._changed()
        return [(module, name, module.__dict__.get(name, _ABSENT)) for module, name, _ in changing]

    def enter(self) -> None:
        """Set the attributes to what the forward found there."""
        fresh = Rebuilding(iter(()), iter(()), self._state)
        changing = self._attributes if self._is_closed else list(self._changed())
        put_back((module, name, fresh.of(packed)) for module, name, packed in changing)


def put_back(attributes: Iterable[Attribute]) -> None:
    """Set attributes of modules to these values."""
    for module, name, value in attributes:
        if value is _ABSENT:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = value


def _is_noted(value: Any) -> bool:
    return value is _ABSENT or value is None or isinstance(value, Tensor | tuple)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor)


def _assigned_by(kind: type) -> tuple[str, ...]:
    """The attributes that methods of a class, and of its bases, assign by name."""
    entry = _names.get(id(kind))
    if entry is None:
        entry = _names[id(kind)] = (
            ref(kind, functools.partial(_forget, id(kind))),
            tuple(dict.fromkeys(_find_assigned(kind))),
        )
        if not entry[1]:
            _assigning_nothing.add(id(kind))
    return entry[1]


def _forget(key: int, _: Any) -> None:
    _names.pop(key, None)
    _assigning_nothing.discard(key)


def _find_assigned(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if is_of_a_library(base.__module__):
            continue
        for name, member in list(vars(base).items()):
            function = inspect.unwrap(member) if inspect.isfunction(member) else None
            if function is not None and name != "__init__":
                yield from _assigned_in(function.__code__)


def _assigned_in(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _assigned_in(constant)
