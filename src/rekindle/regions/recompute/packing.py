"""Taking the arguments of a region apart, to hold them until its replay.

Containers among the arguments are copied, and their tensors go through hooks. The contents of
objects are recorded: Note [Objects among the arguments] in object_state.py.
"""

import io
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.regions.recompute.containers import (
    AsItIs,
    Hooks,
    PackedTensor,
    leads_to_object,
    take_apart,
)
from rekindle.regions.recompute.object_state import Layout, ObjectState, layout_of
from rekindle.regions.recompute.random_generators import PLAIN, is_of_a_library
from rekindle.regions.recompute.state_tensors import Path, TensorState, write_history_of

_MOST = 2048
"""Objects, containers and tensors that one argument may lead to; with more, it is left as it is."""
_DEEPEST = 64
"""How many steps an argument may lead."""


class Packing:
    """Takes arguments apart for holding: tensors go through hooks, containers are copied."""

    def __init__(
        self,
        hooks: Hooks | None,
        note: Callable[[Tensor], None],
        function: Any,
        call: Any,
        keep_graphs: bool,
    ) -> None:
        self._hooks = hooks
        self._note = note
        self._function = function
        self._call = call
        """Positional and keyword arguments, in which to look for an argument's name."""
        self._done: dict[int, Any] = {}
        """Packed forms of values that may occur twice, by the id of the value."""
        self._keep_graphs = keep_graphs
        """True if tensors that objects hold are held with the graphs that made them."""
        self.objects: list[ObjectState] = []
        self.tensors: list[TensorState] = []
        """The tensors that objects hold."""
        self.devices: set[torch.device] = set()
        """Where those are, the CPU aside."""
        self.left_alone: list[tuple[Path, str]] = []
        """Where there is something that cannot be made again, and of what kind it is."""
        self._visits = 0
        self._history: dict[Path, int] | None = None
        """Which tensors the function is known to write to, by their paths."""

    def pack(self, value: Any) -> Any:
        """A value that is an argument, or in a container among the arguments."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if id(value) not in self._done:
            self._done[id(value)] = self._pack(value, kind)
        return self._done[id(value)]

    def _pack(self, value: Any, kind: type) -> Any:
        if isinstance(value, Tensor):
            self._note(value)
            return value if self._hooks is None else PackedTensor(value, self._hooks)
        taken_apart = take_apart(value, kind, self.pack)
        if taken_apart is not None:
            return taken_apart
        if hasattr(kind, "__next__") and not isinstance(value, io.IOBase):
            raise TypeError(
                f"A region was called with an iterator ({kind.__name__}): a region runs twice, and "
                "an iterator can be read once. Pass a list or a tuple."
            )
        return self._pack_object(value, kind)

    def pack_bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments that a partial brings with it; those that lead to no object as they are."""
        return (
            [self._pack_if_object(arg, i) for i, arg in enumerate(args)],
            {name: self._pack_if_object(arg, name) for name, arg in kwargs.items()},
        )

    def _pack_if_object(self, value: Any, name: int | str) -> Any:
        if leads_to_object(value):
            return self.pack_state(value, (None, "argument", name))
        return AsItIs(value)

    def _pack_object(self, value: Any, kind: type) -> Any:
        if layout_of(kind) is not None:
            return self.pack_state(value, _path_in(self._call, value))
        if _may_change(kind):
            self.left_alone.append((_path_in(self._call, value), kind.__name__))
        return value

    def pack_state(self, value: Any, path: Path) -> Any:
        """An argument and all that it leads to, as far as that is not too much."""
        objects, tensors, left = len(self.objects), len(self.tensors), len(self.left_alone)
        done = len(self._done)
        self._visits = 0
        try:
            return self._pack_inside(value, path, 0)
        except _TooManyError:
            del self.objects[objects:], self.tensors[tensors:], self.left_alone[left:]
            for key in list(self._done)[done:]:
                del self._done[key]
            self.left_alone.append((path, f"{type(value).__name__}, which leads to too much else"))
            return value

    def _pack_inside(self, value: Any, path: Path, depth: int) -> Any:
        """A value that an object holds: nothing of it goes through hooks."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if id(value) not in self._done:
            self._visits += 1
            if self._visits > _MOST or depth > _DEEPEST:
                raise _TooManyError
            self._done[id(value)] = self._part(value, kind, path, depth + 1)
        return self._done[id(value)]

    def _part(self, value: Any, kind: type, path: Path, depth: int) -> Any:
        if isinstance(value, Tensor):
            if self._history is None:
                self._history = write_history_of(self._function)
            state = TensorState(value, path, self._history, self._keep_graphs)
            self.tensors.append(state)
            if not value.is_cpu:
                self.devices.add(value.device)
            return state
        if kind is list or kind is tuple or kind is dict:
            return self._entries(value, kind, path, depth)
        layout = layout_of(kind)
        if layout is not None:
            return self._object(value, layout, path, depth)
        taken_apart = take_apart(
            value, kind, lambda item: self._pack_inside(item, (path, "in", None), depth)
        )
        if taken_apart is None and _may_change(kind):
            self.left_alone.append((path, kind.__name__))
        return value if taken_apart is None else taken_apart

    def _object(self, value: Any, layout: Layout, path: Path, depth: int) -> ObjectState:
        state = ObjectState(value, layout)
        self._done[id(value)] = state  # before its parts, which may lead back to it
        self.objects.append(state)
        attributes = state.attributes
        for name, part in layout.attributes(value).items():
            attributes[name] = (
                part
                if type(part) in PLAIN
                else self._pack_inside(part, (path, "attribute", name), depth)
            )
        items = layout.items(value)
        if items is not None:
            state.items = self._entries(items, type(items), path, depth)
        return state

    def _entries(self, value: Any, kind: type, path: Path, depth: int) -> Any:
        """A list, a tuple or a dict with its entries packed."""

        def pack(item: Any, key: Any) -> Any:
            key = key if type(key) in PLAIN else None  # a path is kept for longer than the call
            return self._pack_inside(item, (path, "item", key), depth)

        if kind is dict:
            return {key: pack(item, key) for key, item in value.items()}
        return kind([pack(item, index) for index, item in enumerate(value)])


class _TooManyError(Exception):
    """An argument leads to more objects than are looked at."""


_UNCHANGING = (nn.Module, type, torch.Generator, Enum)
"""Of these a replay finds what it needs, or there is nothing to find."""


def _may_change(kind: type) -> bool:
    """True if objects of a class that is not taken apart may hold something that changes."""
    if kind.__module__ in sys.stdlib_module_names:
        return kind is bytearray
    return not (issubclass(kind, _UNCHANGING) or is_of_a_library(kind.__module__))


def _path_in(call: Any, value: Any) -> Path:
    """Where a value is among the arguments of a call, also in containers."""
    args, kwargs = call
    stack: list[tuple[Path, Any]] = [((None, "argument", i), arg) for i, arg in enumerate(args)]
    stack += [((None, "argument", name), arg) for name, arg in kwargs.items()]
    while stack:
        path, found = stack.pop()
        if found is value:
            return path
        if isinstance(found, list | tuple):
            stack += [((path, "item", i), item) for i, item in enumerate(found)]
        elif isinstance(found, dict):
            stack += [((path, "item", key), item) for key, item in found.items()]
    return None, "argument", None
