"""Casts of weights in autocast's cache, which live from a first use until autocast is left.

Note [How long casts live]. In a step, autocast casts a weight in the block that uses it first, and
holds the cast in a cache until the outermost `torch.autocast` is left: usually when the forward and
the loss are done, before the backward. A block that keeps its activations holds the casts that its
products saved until its own backward; a block that is recomputed casts its weights again in its
replay. So each block is run alone as a forward of its own: the cache is empty when it begins and
emptied when it ends, and what is freed then is what only the cache held.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rekindle.planner.nested_tensors import map_tensors
from rekindle.regions.recompute import ambient
from rekindle.regions.recompute.torch_state import entered
from rekindle.rows.row_tensor import runs_by_rows
from rekindle.torch_private.dispatch_modes import TorchDispatchMode, past_modes


@contextmanager
def forward_in_ambient(around: ambient.Ambient | None) -> Iterator[None]:
    """Enter the ambient state of a block's call for one forward, with an empty cache of casts."""
    if around is None:
        yield
        return
    has_autocast = ambient.has_autocast(around)
    if has_autocast:
        torch.clear_autocast_cache()
    try:
        with entered(around):
            yield
    finally:
        if has_autocast:
            torch.clear_autocast_cache()


class _AsOpResult(torch.autograd.Function):
    """The identity, whose result is no leaf of the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ARG004
        return grads[0]


def as_activations(arguments: Any) -> Any:
    """Return a block's arguments as results of ops, as another block would pass them.

    Autocast caches casts of leaves, so a leaf would be cast once where an activation is cast by
    each op that uses it.
    """
    return map_tensors(_as_result, arguments)


def _as_result(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor or not tensor.requires_grad:
        return tensor
    result: Tensor = _AsOpResult.apply(tensor)  # type: ignore[no-untyped-call]
    return result


class CacheWatch:
    """Calls back when autocast's cache is emptied: when a cast of its own in the cache is freed."""

    def __init__(self, on_emptied: Callable[[], None]) -> None:
        self._on_emptied = on_emptied
        self._finalizer: weakref.finalize[..., Any] | None = None

    @property
    def holds_casts(self) -> bool:
        """True if the cache has not been emptied since it was last watched."""
        return self._finalizer is not None and self._finalizer.alive

    def watch(self, device: torch.device) -> None:
        """Watch the cache, if autocast is on for a device and caches casts."""
        if self.holds_casts or not torch.is_autocast_enabled(device.type):
            return
        if not torch.is_autocast_cache_enabled():
            return
        storage = past_modes(_storage_of_a_cast, device)
        if storage is not None:
            self._finalizer = weakref.finalize(storage, self._on_emptied)

    def close(self) -> None:
        """Stop watching."""
        if self._finalizer is not None:
            self._finalizer.detach()


def _storage_of_a_cast(device: torch.device) -> torch.UntypedStorage | None:
    """Have autocast cache a cast of a leaf, and return the cast's storage."""
    with torch.enable_grad(), _LastCast() as last:  # type: ignore[no-untyped-call]
        leaf = torch.ones(1, 1, device=device, dtype=torch.float32, requires_grad=True)
        torch.mm(leaf, leaf)
    storage: torch.UntypedStorage | None = last.storage
    return storage


class _LastCast(TorchDispatchMode):
    """Records the storage that the last cast made."""

    storage: torch.UntypedStorage | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if runs_by_rows(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.storage = out.untyped_storage()
        return out
