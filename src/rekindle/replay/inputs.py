"""What a region holds from forward to backward: the arguments it was called with.

Tensors among them, also inside lists, tuples and dicts, go through the saved-tensor hooks that were
on top when the region was called, exactly as if autograd had saved them: an enclosing region drops
and replays them, `save_on_cpu` moves them. With no hooks they are held as they are.

Note [A changed argument cannot be replayed]. A region that changes an argument in place, or whose
argument is changed afterwards, has lost what the replay would start from. The version counters
tell; the region lets go of its arguments at once (one may be part of the region's own graph by now,
and holding it would make a cycle that nothing collects), and a replay is an error that names it.
"""

import functools
import io
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES

from rekindle.internals import grad_enabled, set_grad_enabled, version_of
from rekindle.replay.generators import PLAIN
from rekindle.versions import counter_owner

_Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Inputs:
    """The arguments of one call of a region, held for its replay."""

    __slots__ = (
        "_args",
        "_changed",
        "_hooks",
        "_kwargs",
        "_shifts",
        "_simple",
        "_tensors",
        "_versions",
        "_wanted",
        "devices",
    )

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: _Hooks | None) -> None:
        self._changed: int | None = None
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._wanted: list[bool] = []
        """Which tensors required a gradient, in the order in which they are met."""
        self.devices: set[torch.device] = set()
        self._args: Any = args
        self._kwargs: Any = kwargs
        self._hooks: list[int] = []
        """How many hooks each tensor has when the forward has ended."""
        self._shifts: list[tuple[Tensor, int]] = []
        """Tensors that hooks gave back for this replay, and how far their versions are behind."""
        self._simple = hooks is None and not kwargs and self._all_simple(args)
        if not self._simple:
            self._tensors, self._versions, self._wanted = [], [], []
            packing = _Packing(hooks, self._note)
            self._args = packing.pack(args)
            self._kwargs = packing.pack(kwargs)

    def _all_simple(self, args: tuple[Any, ...]) -> bool:
        """Note the tensors among the arguments; False if there is more to look at."""
        for arg in args:
            if isinstance(arg, Tensor):
                self._note(arg)
            elif type(arg) not in PLAIN:
                return False
        return len(self._tensors) < 2 or len(set(map(id, self._tensors))) == len(self._tensors)

    def _note(self, tensor: Tensor) -> None:
        self._tensors.append(tensor)
        self._versions.append(version_of(tensor))
        self._wanted.append(tensor.requires_grad)
        if not tensor.is_cpu:
            self.devices.add(tensor.device)

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments; until `close`, if hooks keep them."""
        return self._tensors

    def hand_to(self, hooks: _Hooks) -> None:
        """Hand the tensors to hooks that were not asked when the region was called."""
        packing = _Packing(hooks, lambda _: None)
        self._args = packing.pack(self._args)
        self._kwargs = packing.pack(self._kwargs)
        self._simple = False

    def close(self, hooked: bool) -> None:
        """The forward has ended: hold no more than a replay needs."""
        if self.changed() is not None:
            self._args = self._kwargs = None
        if self._changed is not None or hooked:
            self._tensors = []
        self._hooks = [len(t._backward_hooks or ()) for t in self._tensors]

    def changed(self) -> int | None:
        """The tensor argument that was changed in place since the call, or None.

        Note [A changed argument cannot be replayed].
        """
        for i, version in enumerate(self._versions if self._tensors else ()):
            if version >= 0 and self._tensors[i]._version != version:
                self._changed = i
        return self._changed

    def again(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they were, containers new."""
        if self._simple and self._wanted == [tensor.requires_grad for tensor in self._tensors]:
            return self._args, self._kwargs
        fresh = _Fresh(iter(self._wanted), iter(self._versions))
        self._shifts = fresh.shifts
        return fresh.of(self._args), fresh.of(self._kwargs)

    def version_as_called(self, tensor: Tensor, version: int) -> int:
        """The version that what a replay saved would have, had it begun with the call's arguments.

        Hooks that copy, as `save_on_cpu` does, give an argument back at version 0, whatever it was.
        """
        owner = counter_owner(tensor)
        return version + next((shift for x, shift in self._shifts if x is owner), 0)

    def forget_replay(self) -> None:
        """Let go of the arguments that hooks gave back."""
        self._shifts = []

    def take_off_hooks(self) -> None:
        """A hook that a region puts on an argument is there already: the replay's goes."""
        for tensor, count in zip(self._tensors, self._hooks, strict=False):
            hooks = tensor._backward_hooks
            while hooks and len(hooks) > count:
                hooks.popitem()


class _Packing:
    """Takes arguments apart for holding: tensors go through hooks, containers are copied."""

    def __init__(self, hooks: _Hooks | None, note: Callable[[Tensor], None]) -> None:
        self._hooks = hooks
        self._note = note
        self._done: dict[int, Any] = {}
        """What the values that may be there twice have become, by their id."""

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if id(value) not in self._done:
            self._done[id(value)] = self._pack(value, kind)
        return self._done[id(value)]

    def _pack(self, value: Any, kind: type) -> Any:
        if isinstance(value, Tensor):
            self._note(value)
            return value if self._hooks is None else _Packed(value, self._hooks)
        if kind is tuple or kind is list:
            return kind([self.pack(item) for item in value])
        if kind is dict:
            return {key: self.pack(item) for key, item in value.items()}
        if hasattr(kind, "_fields") and issubclass(kind, tuple):
            make: Callable[[list[Any]], Any] = kind._make  # type: ignore[attr-defined]
            return _Container(make, [self.pack(item) for item in value])
        if kind is _Container:
            return _Container(value.rebuild, [self.pack(item) for item in value.items])
        if kind in SUPPORTED_NODES:
            node = SUPPORTED_NODES[kind]
            items, context = node.flatten_fn(value)
            rebuild = functools.partial(_rebuild, node.unflatten_fn, context)
            return _Container(rebuild, [self.pack(item) for item in items])
        if hasattr(kind, "__next__") and not isinstance(value, io.IOBase):
            raise TypeError(
                f"A region was called with an iterator ({kind.__name__}): a region runs twice, and "
                "an iterator can be read once. Pass a list or a tuple."
            )
        return value


class _Packed:
    """A tensor argument in the keeping of somebody's saved-tensor hooks."""

    __slots__ = ("_held", "_unpack")

    def __init__(self, tensor: Tensor, hooks: _Hooks) -> None:
        self._unpack = hooks[1]
        grad = grad_enabled()
        try:
            set_grad_enabled(False)
            self._held = hooks[0](tensor)
        finally:
            set_grad_enabled(grad)

    def get(self) -> Tensor:
        return self._unpack(self._held)


PACKING = _Packed.__init__.__code__
"""The code that saves the arguments of a nested region: what it saves is surely written."""


class _Container:
    """A container taken apart, and how to put it together again."""

    __slots__ = ("items", "rebuild")

    def __init__(self, rebuild: Callable[[list[Any]], Any], items: list[Any]) -> None:
        self.rebuild = rebuild
        self.items = items


def _rebuild(unflatten: Callable[[Any, Any], Any], context: Any, items: list[Any]) -> Any:
    return unflatten(items, context)


class _Fresh:
    """Puts held arguments together for a replay; what was one object in the call is one again."""

    def __init__(self, wanted: Iterator[bool], versions: Iterator[int]) -> None:
        self._wanted = wanted
        self._versions = versions
        self.shifts: list[tuple[Tensor, int]] = []
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
        if kind is _Container:
            return value.rebuild([self.of(item) for item in value.items])
        given_back = kind is _Packed
        if given_back:
            value = value.get()
        if isinstance(value, Tensor):
            version = next(self._versions)
            if value.requires_grad != next(self._wanted):
                value = value.detach().requires_grad_(not value.requires_grad)
            if given_back and 0 <= version_of(value) < version:  # a copy: else it was changed
                self.shifts.append((counter_owner(value), version - version_of(value)))
        return value
