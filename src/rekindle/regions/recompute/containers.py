"""Arguments as a region holds them: containers taken apart, and tensors in the keeping of hooks."""

import functools
import operator
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

from torch import Tensor

from rekindle.regions.recompute.object_state import Layout, layout_of
from rekindle.regions.recompute.random_generators import ATOMS
from rekindle.torch_private.grad_mode import grad_enabled, set_grad_enabled
from rekindle.torch_private.pytrees import SUPPORTED_NODES

Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class PackedTensor:
    """A tensor argument in the keeping of somebody's saved-tensor hooks."""

    __slots__ = ("_held", "_unpack")

    def __init__(self, tensor: Tensor, hooks: Hooks) -> None:
        self._unpack = hooks[1]
        grad = grad_enabled()
        try:
            set_grad_enabled(False)
            self._held = hooks[0](tensor)
        finally:
            set_grad_enabled(grad)

    def get(self) -> Tensor:
        return self._unpack(self._held)


PACKING = PackedTensor.__init__.__code__
"""The code that saves the arguments of a nested region: what it saves is surely written."""


def packs_arguments(caller: FrameType) -> bool:
    """True if a saved-tensor hook is called for an argument of a nested region, not by autograd."""
    return caller.f_code is PACKING


class Container:
    """A container taken apart, and how to put it together again."""

    __slots__ = ("_kind", "_parts", "items", "rebuild")

    def __init__(
        self,
        kind: type,
        rebuild: Callable[[list[Any]], Any],
        parts: Callable[[Any], list[Any]],
        items: list[Any],
    ) -> None:
        self._kind = kind
        self.rebuild = rebuild
        self._parts = parts
        """The entries of such a container."""
        self.items = items

    def parts_now(self, now: Any) -> list[Any] | None:
        """The entries of what is now in the container's place; None if it is no such container."""
        return list(self._parts(now)) if type(now) is self._kind else None

    def with_items(self, items: list[Any]) -> "Container":
        """A container of this kind, with other entries."""
        return Container(self._kind, self.rebuild, self._parts, items)

    @classmethod
    def of_node(cls, value: Any, kind: type, pack: Callable[[Any], Any]) -> "Container":
        """A container that is registered with torch's pytrees."""
        node = SUPPORTED_NODES[kind]
        items, context = node.flatten_fn(value)
        rebuild = functools.partial(_rebuild, node.unflatten_fn, context)
        parts = functools.partial(_flatten, node.flatten_fn)
        return cls(kind, rebuild, parts, [pack(item) for item in items])


def _flatten(flatten: Callable[[Any], tuple[list[Any], Any]], now: Any) -> list[Any]:
    return flatten(now)[0]


def _rebuild(unflatten: Callable[[Any, Any], Any], context: Any, items: list[Any]) -> Any:
    return unflatten(items, context)


class AsItIs:
    """An argument that is neither looked into nor made anew."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def take_apart(value: Any, kind: type, pack: Callable[[Any], Any]) -> Any:
    """A container with its entries packed; None if the value is none."""
    if kind is tuple or kind is list:
        return kind([pack(item) for item in value])
    if kind is dict:
        return {key: pack(item) for key, item in value.items()}
    if kind is set:
        return Container(kind, set, list, [pack(item) for item in value])
    if hasattr(kind, "_fields") and issubclass(kind, tuple):
        make: Callable[[list[Any]], Any] = kind._make  # type: ignore[attr-defined]
        return Container(kind, make, list, [pack(item) for item in value])
    if kind in SUPPORTED_NODES and _is_whole_in_parts(value, kind):
        return Container.of_node(value, kind, pack)
    return None


def hand_tensors(packed: Any, hooks: Hooks, done: dict[int, Any]) -> Any:
    """Arguments that were packed without hooks, with their tensors in the keeping of some.

    `done` has what values that may be there twice have become, by their id.
    """
    kind = type(packed)
    if id(packed) in done:
        return done[id(packed)]
    made: Any
    if isinstance(packed, Tensor):
        made = PackedTensor(packed, hooks)
    elif kind is tuple or kind is list:
        made = kind([hand_tensors(item, hooks, done) for item in packed])
    elif kind is dict:
        made = {key: hand_tensors(item, hooks, done) for key, item in packed.items()}
    elif kind is Container:
        made = packed.with_items([hand_tensors(item, hooks, done) for item in packed.items])
    else:
        return packed
    done[id(packed)] = made
    return made


def _is_whole_in_parts(value: Any, kind: type) -> bool:
    """True if torch's pytrees rebuild a container from its entries with all that it holds.

    A class may be registered for export alone, with entries that leave out what else it holds.
    """
    layout = layout_of(kind)
    if layout is None:
        return True
    node = SUPPORTED_NODES[kind]
    again = node.unflatten_fn(*node.flatten_fn(value))
    names, parts = _all_parts(layout, value)
    names_again, parts_again = _all_parts(layout, again)
    return names == names_again and all(map(operator.is_, parts, parts_again))


def _all_parts(layout: Layout, value: Any) -> tuple[list[Any], list[Any]]:
    """Names and keys of all that an object holds; and what it holds."""
    attributes, items = layout.attributes(value), layout.items(value)
    entries = dict(enumerate(items)) if isinstance(items, list) else items or {}
    return [*attributes, *entries], [*attributes.values(), *entries.values()]


def leads_to_object(value: Any) -> bool:
    """True if a value is an object that is taken apart, or a container with one in it."""
    kind = type(value)
    if kind in ATOMS:
        return False
    if layout_of(kind) is not None:
        return True
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | set | deque):
        return False
    return any(map(leads_to_object, value))
