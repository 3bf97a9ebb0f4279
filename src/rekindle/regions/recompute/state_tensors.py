"""Tensors that the objects among a region's arguments hold, as they were when the region began.

Note [Tensors that a region writes to in place]. A cache may own its memory and be written to in
place. What such a tensor held before is known after the forward only if it was copied before, and
to copy every tensor of every cache at every call would cost more than the region. Small tensors on
the CPU, such as counters, are always copied. The others are copied the first times that a function
finds a tensor in a place, until it is known whether the function writes to it; then only if it
does. Copies of what the forward did not write to are let go when it has ended.

A tensor that somebody writes to after the region has ended (the next layer, in its own part of the
cache) is no longer what it was. Most likely the region never looks at it, so that alone is no
error: the replay gets an `UnavailableTensor` in its place, and an op on that is an error which
names the argument.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from rekindle.torch_private.autograd_graph import grad_fn_of
from rekindle.torch_private.dispatch_modes import past_modes
from rekindle.torch_private.pytrees import tree_leaves
from rekindle.torch_private.storages import storage_key
from rekindle.torch_private.torch_function import subclass_functions_disabled
from rekindle.torch_private.version_counters import detached, set_version, version_of

Path: TypeAlias = tuple[Any, ...]
"""Where something is among the arguments: the path of what holds it, a kind of step, and a key."""

_SMALL = 4096
"""A tensor of so many bytes on the CPU is copied at every call."""
_LEARNING = 3
"""How often a tensor is copied, and found to be the same, before it is left alone."""
_WRITTEN = -1
_MANY_PLACES = 1 << 14
"""So many places of one function are remembered; then it is learnt anew."""

_histories: WeakKeyDictionary[Any, dict[Path, int]] = WeakKeyDictionary()
"""By function, or by the module it belongs to: how often a tensor in a place was not written to."""


def write_history_of(function: Any) -> dict[Path, int]:
    """How often a function left the tensor at a path alone, or that it writes to it, by path."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    key: Any = owner if isinstance(owner, nn.Module) else getattr(function, "__code__", None)
    if key is None:
        key = function if isinstance(function, nn.Module) else type(function)
    history = _histories.setdefault(key, {})
    if len(history) > _MANY_PLACES:
        history.clear()
    return history


class TensorState:
    """One tensor that an object holds, as the forward found it."""

    __slots__ = (
        "_alias",
        "_copy",
        "_history",
        "_meta",
        "_original",
        "_version",
        "_wanted",
        "path",
    )

    def __init__(
        self, tensor: Tensor, path: Path, history: dict[Path, int], keep_graph: bool = False
    ) -> None:
        self.path = path
        self._history = history
        self._original = ref(tensor)
        self._meta: tuple[torch.Size, torch.dtype] | None = None
        """Shape and dtype of a tensor that is let go."""
        self._wanted = tensor.requires_grad
        self._version = version_of(tensor)
        self._alias: Tensor | None = tensor
        """The tensor's memory and version; without its graph, which may come to hold the region."""
        if not (keep_graph or (self._wanted and grad_fn_of(tensor) is None)):
            self._alias = past_modes(detached, tensor)
        self._copy: Tensor | None = None
        if history.get(path, 0) < _LEARNING or _is_small(tensor):
            self._copy = self._copied()

    def _copied(self) -> Tensor | None:
        if self._version < 0 or self._alias is None:
            return None
        try:
            return past_modes(_copy_of, self._alias.detach())
        except torch.OutOfMemoryError:  # do without: an error only if it is needed
            return None

    def close(self) -> None:
        """The forward has ended: learn whether it wrote to the tensor, and let go of the rest."""
        alias = self._alias
        if alias is None:
            return
        if self.has_changed():
            self._history[self.path] = _WRITTEN
            self._meta = alias.shape, alias.dtype
            self._alias = None  # it may belong to the region's own graph by now
        elif self._copy is not None and not _is_small(alias):
            self._copy = None
            seen = self._history.get(self.path, 0)
            if seen != _WRITTEN:
                self._history[self.path] = seen + 1

    def has_changed(self) -> bool:
        """True if somebody wrote to the tensor since the region was called."""
        alias, version = self._alias, self._version
        return alias is None or (version >= 0 and alias._version != version)

    def is_still(self, tensor: Any) -> bool:
        """True if this is the very tensor, as it was."""
        original = self._original()
        if original is None or original is not tensor or self.has_changed():
            return False
        return original.requires_grad == self._wanted

    def written_memory(self) -> int | None:
        """A key for the memory of a tensor that the forward wrote to; None if it did not."""
        if self._copy is None or self._alias is None or not self.has_changed():
            return None
        return past_modes(_memory_of, self._alias)

    def forget_copy(self) -> None:
        """Do without the copy: another tensor shows the same memory, and is copied apart."""
        self._copy = None

    def use_copy(self) -> None:
        """Have `again` give a copy, although nobody wrote to the tensor; but of no leaf.

        A leaf that learns is not written to in place, and gradients are to find it.
        """
        if self._alias is not self._original():
            self._copy = self._copied()
            self._alias = None

    def again(self, error: Callable[[], Exception]) -> Tensor:
        """The tensor as it was, for a replay; if it is lost, whoever uses it raises `error`."""
        if self._alias is not None and not self.has_changed():
            original = self._original()
            if original is not None and original.requires_grad == self._wanted:
                return original
            return past_modes(self._alias.detach).requires_grad_(self._wanted)
        if self._copy is None:
            alias = self._alias
            meta = self._meta if alias is None else (alias.shape, alias.dtype)
            return past_modes(_unavailable, meta, error)
        stand_in = past_modes(self._stand_in)
        set_version(stand_in, self._version)
        return stand_in

    def _stand_in(self) -> Tensor:
        assert self._copy is not None, "the caller has looked"
        # Not a leaf: the replay is to write to it in place.
        return _copy_of(self._copy.detach().requires_grad_(self._wanted))


def _is_small(tensor: Tensor) -> bool:
    """True if a tensor is copied at every call."""
    return tensor.is_cpu and tensor.nbytes <= _SMALL


def _copy_of(tensor: Tensor) -> Tensor:
    """A copy with the same strides, so that kernels do the same with it."""
    copy = tensor.clone()
    if tensor.layout is not torch.strided or copy.stride() == tensor.stride():
        return copy
    size, stride = tensor.shape, tensor.stride()
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    flat = tensor.as_strided((span,), (1,), tensor.storage_offset())
    return flat.clone().as_strided(size, stride, 0)


def _memory_of(tensor: Tensor) -> int | None:
    try:
        return storage_key(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # a subclass that is made of others
        return None


def _unavailable(
    meta: tuple[torch.Size, torch.dtype], error: Callable[[], Exception]
) -> "UnavailableTensor":
    tensor = torch.empty(meta[0], dtype=meta[1], device="meta").as_subclass(UnavailableTensor)
    tensor.error = error
    return tensor


_HARMLESS = frozenset(
    (
        Tensor.shape.__get__,  # type: ignore[attr-defined]
        Tensor.dtype.__get__,  # type: ignore[attr-defined]
        Tensor.ndim.__get__,  # type: ignore[attr-defined]
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.__len__,
    )
)
"""Functions that a tensor which is not there can answer: they read its shape and dtype."""


class UnavailableTensor(Tensor):
    """In place of a tensor that was written to: every op on it raises."""

    error: Callable[[], Exception]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HARMLESS:
            with subclass_functions_disabled():
                return func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, UnavailableTensor):
                error: Exception = vars(value)["error"]()
                raise error
        raise AssertionError("called for one of the arguments")
