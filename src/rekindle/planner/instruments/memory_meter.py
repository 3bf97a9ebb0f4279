"""Meters of the bytes in use on a device: by the allocator on CUDA, op by op elsewhere.

One meter may cover a whole profile: meters inside it are then windows of it, and its own peak is
the peak of profiling itself.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from rekindle.rows.row_tensor import RowTensor, runs_by_rows
from rekindle.torch_private.dispatch_modes import (
    TorchDispatchMode,
    entered_modes,
    is_traceable_wrapper_subclass,
)
from rekindle.torch_private.fake_mode import FakeTensor
from rekindle.torch_private.pytrees import tree_leaves
from rekindle.torch_private.storages import storage_key


class Meter(Protocol):
    """Bytes in use above what there was at the start."""

    def now(self) -> int:
        """Bytes in use now."""

    def peak(self) -> int:
        """The most bytes in use since the last `reset`."""

    def reset(self) -> None:
        """Begin a new peak."""

    def reset_soon(self) -> None:
        """Begin a new peak once the memory that is being freed now is free."""


class _CudaMeter:
    """Reads torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = torch.cuda.memory_allocated(device)
        self.reset()

    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._start

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._start

    def reset(self) -> None:
        whole = _whole.get()
        if isinstance(whole, _WholeCudaMeter):
            whole.note_peak()
        torch.cuda.reset_peak_memory_stats(self._device)

    def reset_soon(self) -> None:
        self.reset()


class _WholeCudaMeter(_CudaMeter):
    """Reads torch's allocator while other meters reset its peak."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._highest = 0

    def note_peak(self) -> None:
        """Note the allocator's peak, which is about to be reset."""
        self._highest = max(self._highest, super().peak())

    def peak(self) -> int:
        self.note_peak()
        return self._highest


class Watcher(Protocol):
    """Told of each storage that a meter counts."""

    def on_made(self, address: int, nbytes: int) -> None:
        """A storage counts from now on."""

    def on_freed(self, address: int) -> None:
        """A storage counts no more."""


class _Tally:
    """Counts bytes of storages that were first seen since it began, and that are alive.

    Storages of before are not counted, neither when they are freed: a garbage collection may come
    at any time, and a measurement does not depend on when.
    """

    def __init__(
        self,
        before: Iterable[int],
        known: Iterable[Tensor],
        see_sizes: Callable[[], None],
        watcher: Watcher | None = None,
    ) -> None:
        self._see_sizes = see_sizes
        """Called before bytes are read: a storage may have changed its size."""
        self._watcher = watcher
        self._now = self._peak = 0
        self._sizes: dict[int, int] = {}
        """Bytes of storages, by their addresses."""
        self._known = [storage for tensor in known for storage in storages_of(tensor)]
        """Storages of before, held so that no other storage gets their addresses."""
        self._before = {*before, *(storage_key(storage) for storage in self._known)}
        self._resets = False

    def now(self) -> int:
        self._see_sizes()
        return self._now

    def peak(self) -> int:
        return self._peak

    def reset(self) -> None:
        self._peak = self.now()

    def reset_soon(self) -> None:
        self._resets = True

    def begin_op(self) -> None:
        """Begin a new peak if one was asked for: memory that was being freed is free by now."""
        if self._resets:
            self._resets = False
            self.reset()

    def add(self, address: int, nbytes: int) -> None:
        """Count a storage that is seen for the first time."""
        if address not in self._before:
            self._sizes[address] = nbytes
            self._now += nbytes
            self._peak = max(self._peak, self._now)
            if self._watcher is not None:
                self._watcher.on_made(address, nbytes)

    def drop(self, address: int) -> None:
        """Uncount a storage that is freed; another may get its address from now on."""
        self._before.discard(address)
        if address in self._sizes:
            self._now -= self._sizes.pop(address)
            if self._watcher is not None:
                self._watcher.on_freed(address)


class LiveBytes(TorchDispatchMode):
    """Counts, op by op, the bytes of storages that ops return and that are alive, each once.

    Memory that no op returns is not counted: scratch inside an op, random states that regions hold,
    Python objects. docs/budget.md says how much that is.

    Note [Storages that are emptied]. FSDP keeps the storage of a parameter that it gathered, and
    takes its bytes away, with no op that could be seen. It does so around its collectives: so
    sizes are read again there, and when a meter is read; and storages that collectives are given
    count as those that ops return.
    """

    supports_higher_order_operators = True

    def __init__(self, not_counted: Iterable[Tensor] = (), watcher: Watcher | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = _Tally((), not_counted, _do_nothing, watcher)
        self._tallies = [self._own]
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Storages that were seen, by their addresses, with their bytes at that time."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def now(self) -> int:
        self._see_sizes()
        return self._own.now()

    def peak(self) -> int:
        return self._own.peak()

    def reset(self) -> None:
        self._see_sizes()
        self._own.reset()

    def reset_soon(self) -> None:
        self._own.reset_soon()

    @contextmanager
    def window(self, not_counted: Iterable[Tensor] = ()) -> Iterator[Meter]:
        """Meter what runs inside, as another `LiveBytes` would."""
        self._see_sizes()
        has_bytes = (address for address, (_, nbytes) in self._alive.items() if nbytes)
        tally = _Tally(has_bytes, not_counted, self._see_sizes)
        self._tallies.append(tally)
        try:
            yield tally
        finally:
            self._tallies.remove(tally)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if runs_by_rows(types):
            return NotImplemented
        communicates = getattr(func, "namespace", None) in _COMMUNICATING
        if communicates:
            self._see_sizes()
        for tally in self._tallies:
            tally.begin_op()
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result) if communicates else result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        for storage in storages_of(tensor):
            address, nbytes = storage_key(storage), storage.nbytes()
            seen = self._alive.get(address)
            if seen is None:
                weakref.finalize(storage, _forget, weakref.ref(self), address)
            elif seen[1] == nbytes:
                continue
            self._set_size(address, weakref.ref(storage), nbytes)

    def _see_sizes(self) -> None:
        """Read the sizes of storages again: Note [Storages that are emptied]."""
        for address, (weak, before) in list(self._alive.items()):
            storage = weak()
            if storage is not None and storage.nbytes() != before:
                self._set_size(address, weak, storage.nbytes())

    def _set_size(
        self, address: int, storage: "weakref.ref[torch.UntypedStorage]", nbytes: int
    ) -> None:
        """Count a storage that is seen for the first time, or has changed its size."""
        is_known = address in self._alive
        self._alive[address] = storage, nbytes
        for tally in self._tallies:
            if is_known:
                tally.drop(address)
            tally.add(address, nbytes)

    def forget(self, address: int) -> None:
        """Uncount a storage that is freed."""
        del self._alive[address]
        for tally in self._tallies:
            tally.drop(address)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not meter what runs inside, so that metering does not cost it time.

        It is metered if another mode was entered since: modes leave in their order.
        """
        entered = entered_modes()
        if not entered or entered[-1] is not self:
            yield
            return
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


def _do_nothing() -> None:
    """Leave sizes to the meter that holds the tally, which the tally is not to hold."""


_COMMUNICATING = ("c10d", "_c10d_functional", "fsdp")
"""Namespaces of collectives, and of the ops that copy in and out for them."""


def _forget(meter: "weakref.ref[LiveBytes]", address: int) -> None:
    """Uncount a freed storage, which may have outlived the meter."""
    live = meter()
    if live is not None:
        live.forget(address)


_whole: "ContextVar[LiveBytes | _WholeCudaMeter | None]" = ContextVar("whole", default=None)
"""The meter that covers the whole profile, if one does."""


@contextmanager
def metered_as_a_whole(device: torch.device, known: Iterable[Tensor] = ()) -> Iterator[Meter]:
    """Meter all that runs inside; `metered` meters parts of it."""
    whole = _WholeCudaMeter(device) if device.type == "cuda" else LiveBytes(known)
    token = _whole.set(whole)
    try:
        if isinstance(whole, LiveBytes):
            with whole:
                yield whole
        else:
            yield whole
    finally:
        _whole.reset(token)


def meters_freely(device: torch.device) -> bool:
    """Return whether what is metered may be timed as well: the allocator counts in any case."""
    return device.type == "cuda"


@contextmanager
def metered(device: torch.device, known: Iterable[Tensor] = ()) -> Iterator[Meter]:
    """Meter what runs inside; `known` are tensors that exist before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        yield _CudaMeter(device)
        return
    whole = _whole.get()
    if not isinstance(whole, LiveBytes):
        with LiveBytes(known) as live:
            yield live
        return
    with whole.window(known) as window:
        yield window


@contextmanager
def unmetered() -> Iterator[None]:
    """Run what is inside without a meter, so that it can be timed."""
    whole = _whole.get()
    if isinstance(whole, LiveBytes):
        with whole.paused():
            yield
    else:
        yield


_has_parts: Callable[[Tensor], bool] = is_traceable_wrapper_subclass


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor; of a subclass that is made of others, those of its parts.

    Of a tensor that is computed by rows, those that it is computed from. Empty for a tensor without
    storage, such as a sparse one.
    """
    if isinstance(tensor, RowTensor):
        return [leaf.tensor.untyped_storage() for leaf in tensor.node.leaves]
    if _has_parts(tensor) and not isinstance(tensor, FakeTensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = (getattr(tensor, name) for name in names)
        return [s for part in parts if isinstance(part, Tensor) for s in storages_of(part)]
    with suppress(NotImplementedError, RuntimeError):
        return [tensor.untyped_storage()]
    return []


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors on this rank, each storage once."""
    storages = (storage for tensor in tensors for storage in storages_of(tensor))
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())
