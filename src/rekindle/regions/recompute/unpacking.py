"""Rebuilding held arguments for a replay, with objects as they were before the forward.

Note [Objects among the arguments] in object_state.py says which objects are made anew.
"""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rekindle.regions.recompute.containers import AsItIs, Container, PackedTensor
from rekindle.regions.recompute.object_state import ObjectState
from rekindle.regions.recompute.random_generators import PLAIN
from rekindle.regions.recompute.state_tensors import Path, TensorState
from rekindle.torch_private.version_counters import counter_owner, version_of

if TYPE_CHECKING:
    from rekindle.regions.recompute.call_state import CallState


class Rebuilding:
    """Rebuilds held arguments for a replay; what was one object in the call is one again."""

    def __init__(
        self, wanted: Iterator[bool], versions: Iterator[int], state: "CallState | None"
    ) -> None:
        self._wanted = wanted
        self._versions = versions
        self.shifts: list[tuple[Tensor, int]] = []
        """Tensors that hooks gave back as copies, and how far their versions are behind."""
        self._state = state
        self._originals = {} if state is None else state.originals()
        """Objects that are what they were, by the id of their state."""
        self._done: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if id(value) not in self._done:
            self._done[id(value)] = self._make(value, kind)
        return self._done[id(value)]

    def _make(self, value: Any, kind: type) -> Any:
        if kind is tuple or kind is list:
            return kind([self.of(item) for item in value])
        if kind is dict:
            return {key: self.of(item) for key, item in value.items()}
        if kind is Container:
            return value.rebuild([self.of(item) for item in value.items])
        if kind is ObjectState:
            return self._object(value)
        if kind is AsItIs:
            return value.value
        if kind is TensorState:
            assert self._state is not None, "it was packed with others"
            return value.again(functools.partial(self._state.lost, value.path))
        given_back = kind is PackedTensor
        if given_back:
            value = value.get()
        if isinstance(value, Tensor):
            return self._tensor(value, given_back)
        return value

    def _tensor(self, value: Tensor, given_back: bool) -> Tensor:
        version = next(self._versions)
        if value.requires_grad != next(self._wanted):
            value = value.detach().requires_grad_(not value.requires_grad)
        if given_back and 0 <= version_of(value) < version:  # a copy: else it was changed
            self.shifts.append((counter_owner(value), version - version_of(value)))
        return value

    def _object(self, state: ObjectState) -> Any:
        original = self._originals.get(id(state))
        if original is not None:
            return original
        new = self._done[id(state)] = state.blank()  # before its parts, which may lead back to it
        attributes = {name: self.of(part) for name, part in state.attributes.items()}
        state.fill(new, attributes, self.of(state.items))
        return new


def as_they_were(objects: list[ObjectState]) -> dict[int, Any]:
    """The objects to which nothing happened since they were taken apart, by the id of their state.

    Neither did anything happen to those that they lead to.
    """
    found: dict[int, Any] = {}
    led_to: dict[int, list[ObjectState]] = {}
    for state in objects:
        original = state.original()
        if original is None or state.written:
            continue
        parts: list[ObjectState] = []
        if holds_what_it_held(state, original, parts):
            found[id(state)] = original
            led_to[id(state)] = parts
    before = len(objects)
    while len(found) != before:  # what leads to a copy is copied too
        before = len(found)
        for key in [k for k in found if any(id(part) not in found for part in led_to[k])]:
            del found[key]
    return found


def holds_what_it_held(state: ObjectState, original: Any, parts: list[ObjectState]) -> bool:
    """True if an object has the same attributes and entries as before; adds objects it leads to."""
    attributes, items = state.parts_now(original)
    before = state.attributes
    if len(before) != len(attributes):
        return False
    for name, now in attributes.items():
        packed = before.get(name, _NOTHING)
        if packed is not now and not matches(packed, now, parts):
            return False
    return matches(state.items, items, parts)


_NOTHING = object()
"""In place of an attribute that was not there."""


def matches(packed: Any, now: Any, parts: list[ObjectState]) -> bool:
    """True if a value now is the one that was packed, with the same entries."""
    kind = type(packed)
    if kind is ObjectState:
        parts.append(packed)
        return now is not None and packed.original() is now
    if kind is TensorState:
        return bool(packed.is_still(now))
    if packed is now:
        return True
    if kind is Container:
        packed, now = packed.items, packed.parts_now(now)
        if now is None:
            return False
    elif type(now) is not kind:
        return False
    elif kind is dict:
        if packed.keys() != now.keys() or list(packed) != list(now):
            return False
        packed, now = packed.values(), now.values()
    elif kind is not list and kind is not tuple:
        return False
    return len(packed) == len(now) and all(
        matches(a, b, parts) for a, b in zip(packed, now, strict=True)
    )


def paths_of_tensors(args: Any, kwargs: Any, before: int) -> Iterator[Path]:
    """Where the tensors are in packed arguments, in the order in which they were packed.

    `before` is how many positional arguments there are before these.
    """
    seen: set[int] = set()
    stack: list[tuple[Path, Any]] = [
        ((None, "argument", name), value) for name, value in reversed(kwargs.items())
    ]
    stack += [((None, "argument", before + i), args[i]) for i in reversed(range(len(args)))]
    while stack:
        path, value = stack.pop()
        if type(value) in PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor | PackedTensor):
            yield path
        elif isinstance(value, dict):
            stack += [((path, "item", key), part) for key, part in reversed(value.items())]
        elif isinstance(value, list | tuple):
            stack += [((path, "item", i), value[i]) for i in reversed(range(len(value)))]
        elif isinstance(value, Container):
            stack += [((path, "in", None), part) for part in reversed(value.items)]
