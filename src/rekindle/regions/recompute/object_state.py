"""Objects that a region may write to: taken apart before its forward, made again for its replay.

Note [Objects among the arguments]. A region may write to an object that it is called with: a cache
of keys and values, a log, a namespace. The replay would find what the forward wrote, and write to
it a second time. So the contents of every such object are recorded before the forward. The replay
gets the object itself if it still holds just that and the forward did not write to it. Else the
replay gets a copy, made from the record: the object itself is not touched in backward.

A region knows these objects weakly. An object to which a region wrote tensors leads to the graph,
and the graph to the region; nothing would collect that. Where the object is gone by the time of the
replay, there is a copy.

Taken apart are objects of classes written in Python, also those derived from `list`, `dict`, `set`
and `deque`: attributes, slots and items. Objects of torch's and Python's own classes are not, nor
modules, enums, objects with a `__del__`, which a copy would run once more, and objects that other
languages hold. What a region does to those is done twice, as in torch.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from enum import Enum
from types import MemberDescriptorType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from rekindle.regions.recompute.random_generators import is_of_a_library

_NEVER = (nn.Module, Tensor, torch.Generator, type, Enum, BaseException)
_BASES: tuple[type, ...] = (OrderedDict, defaultdict, dict, list, set, deque, SimpleNamespace)
"""Classes of Python's own whose subclasses can be made anew, the more special ones first."""


class Layout:
    """Where the objects of one class hold what they hold, and how an empty one is made."""

    __slots__ = ("_base", "_slots")

    def __init__(self, base: type, slots: Iterable[str]) -> None:
        self._base = base
        self._slots = tuple(slots)

    def attributes(self, value: Any) -> dict[str, Any]:
        """The attributes that an object has of its own."""
        own = _own(value)
        if not self._slots:
            return {} if own is None else own
        found = {} if own is None else dict(own)
        for name in self._slots:
            try:
                found[name] = object.__getattribute__(value, name)
            except AttributeError:  # a slot that is empty
                continue
        return found

    def items(self, value: Any) -> list[Any] | dict[Any, Any] | None:
        """The entries of an object that is a container too."""
        base: Any = self._base
        if base is object or base is SimpleNamespace:
            return None
        return dict(base.items(value)) if issubclass(base, dict) else list(base.__iter__(value))

    def blank(self, kind: type, extra: Any) -> Any:
        """An object of the class that holds nothing; `extra` is from `extra_of`."""
        base: Any = self._base
        new = base.__new__(kind)
        if self._base is defaultdict:
            defaultdict.__init__(new, extra)
        elif self._base is deque:
            deque.__init__(new, (), extra)
        return new

    def extra_of(self, value: Any) -> Any:
        """The default factory or the maximal length of a container, if it has one."""
        if self._base is defaultdict:
            return value.default_factory
        return value.maxlen if self._base is deque else None

    def fill(self, new: Any, attributes: dict[str, Any], items: Any) -> None:
        """Fill a blank object with attributes and entries."""
        own = _own(new)
        for name, value in attributes.items():
            if name in self._slots or own is None:
                object.__setattr__(new, name, value)
            else:
                own[name] = value
        if items is None:
            return
        base: Any = self._base
        if issubclass(base, dict):
            for key, value in items.items():
                base.__setitem__(new, key, value)
        elif base is set:
            set.update(new, items)
        else:
            base.extend(new, items)


def _own(value: Any) -> dict[str, Any] | None:
    try:
        own: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return own


_layouts: WeakKeyDictionary[type, Layout | None] = WeakKeyDictionary()


def layout_of(kind: type) -> Layout | None:
    """How objects of a class are taken apart; None if they are not."""
    try:
        return _layouts[kind]
    except KeyError:
        layout = _layouts[kind] = _find_layout(kind)
        return layout


def _find_layout(kind: type) -> Layout | None:
    if issubclass(kind, _NEVER) or hasattr(kind, "__del__") or hasattr(kind, "__next__"):
        return None
    if is_of_a_library(kind.__module__):
        return None
    if kind in _BASES and kind is not SimpleNamespace:
        return None  # a container as it comes, which is packed as one
    base: Any = next((base for base in _BASES if issubclass(kind, base)), object)
    try:
        base.__new__(kind)
    except TypeError:  # another language holds what it holds
        return None
    slots = [
        name
        for owner in kind.__mro__
        for name, member in vars(owner).items()
        if type(member) is MemberDescriptorType and owner not in _BASES
    ]
    if base is object and not slots and not kind.__dictoffset__:
        return None  # it holds nothing
    return Layout(base, slots)


class ObjectState:
    """Attributes and entries of one object from before a forward.

    Note [Objects among the arguments].
    """

    __slots__ = ("_extra", "_find", "_kind", "_layout", "attributes", "items", "written")

    def __init__(self, value: Any, layout: Layout) -> None:
        self._kind = type(value)
        self._layout = layout
        self._extra = layout.extra_of(value)
        self._find: Callable[[], Any]
        try:
            self._find = ref(value)
        except TypeError:  # its class has slots, and none for weak references
            self._find = lambda: value
        self.attributes: dict[str, Any] = {}
        """The packed values of its attributes."""
        self.items: list[Any] | dict[Any, Any] | None = None
        """Its packed entries, if it is a container too."""
        self.written = True
        """True if the forward wrote to it, as far as is known: it has not ended yet."""

    def original(self) -> Any:
        """The object itself, or None if it is gone."""
        return self._find()

    def parts_now(self, value: Any) -> tuple[dict[str, Any], Any]:
        """Attributes and entries that the object has now."""
        return self._layout.attributes(value), self._layout.items(value)

    def blank(self) -> Any:
        """A new object of the same class that holds nothing yet."""
        return self._layout.blank(self._kind, self._extra)

    def fill(self, new: Any, attributes: dict[str, Any], items: Any) -> None:
        """Fill a blank object of this class with attributes and entries."""
        self._layout.fill(new, attributes, items)
