"""Bytes in use on a device, now and at their peak: from the allocator on CUDA, op by op elsewhere.

One meter may cover a whole profile: meters inside it are then windows of it, and what is read is
its highest point, the peak of profiling itself.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

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
        """Begin a new peak when what is being freed now is gone, as far as that can be told."""


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
    """The same over a stretch in which other meters begin new peaks."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._highest = 0

    def note_peak(self) -> None:
        """The allocator's own peak is about to be reset."""
        self._highest = max(self._highest, super().peak())

    def peak(self) -> int:
        self.note_peak()
        return self._highest


class _Tally:
    """Bytes of storages that were seen since it began and are alive.

    What was there before is not counted, and so is not missed when it goes: the garbage collector
    may come at any time, and a measurement does not depend on when.
    """

    def __init__(
        self, before: Iterable[int], known: Iterable[Tensor], see_sizes: Callable[[], None]
    ) -> None:
        self._see_sizes = see_sizes
        """Called before bytes are told: a storage may have changed its size."""
        self._now = self._peak = 0
        self._sizes: dict[int, int] = {}
        """Of storages, by their addresses."""
        self._known = [storage for tensor in known for storage in storages_of(tensor)]
        """Held, so that no other storage gets their addresses."""
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
        """An op is about to run: what was being freed is gone."""
        if self._resets:
            self._resets = False
            self.reset()

    def add(self, address: int, nbytes: int) -> None:
        """A storage was seen for the first time."""
        if address not in self._before:
            self._sizes[address] = nbytes
            self._now += nbytes
            self._peak = max(self._peak, self._now)

    def drop(self, address: int) -> None:
        """A storage is gone; there may be another at its address from now on."""
        self._before.discard(address)
        self._now -= self._sizes.pop(address, 0)


class LiveBytes(TorchDispatchMode):
    """Sees every op, and adds up the storages that ops made and that are alive, each once.

    Memory that no op returns is not seen: scratch inside an op, random states that regions hold,
    what Python objects take. docs/budget.md says how much that is.

    Note [Storages that are emptied]. FSDP keeps the storage of a parameter that it gathered, and
    takes its bytes away, with no op that could be seen. It does so around its collectives: there
    sizes are looked at again, and when a meter is read; and what collectives are given counts as
    what ops return does.
    """

    supports_higher_order_operators = True

    def __init__(self, not_counted: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = _Tally((), not_counted, _seen_already)
        self._tallies = [self._own]
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Storages that were seen, by their addresses, with their bytes when they were."""

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
        """A meter over what runs inside, as another `LiveBytes` would be."""
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
        """Look at the sizes of storages again: Note [Storages that are emptied]."""
        for address, (weak, before) in list(self._alive.items()):
            storage = weak()
            if storage is not None and storage.nbytes() != before:
                self._set_size(address, weak, storage.nbytes())

    def _set_size(
        self, address: int, storage: "weakref.ref[torch.UntypedStorage]", nbytes: int
    ) -> None:
        """A storage was seen for the first time, or has another size than when it was."""
        is_known = address in self._alive
        self._alive[address] = storage, nbytes
        for tally in self._tallies:
            if is_known:
                tally.drop(address)
            tally.add(address, nbytes)

    def forget(self, address: int) -> None:
        """A storage is gone."""
        del self._alive[address]
        for tally in self._tallies:
            tally.drop(address)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not look at what runs inside, so that looking does not cost it time.

        Unless another mode was entered since: modes leave in their order.
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


def _seen_already() -> None:
    """Nothing: whoever holds this tally looks at sizes, and is not to be held by it."""


_COMMUNICATING = ("c10d", "_c10d_functional", "fsdp")
"""Where the ops of collectives are, with those that copy in and out for them."""


def _forget(meter: "weakref.ref[LiveBytes]", address: int) -> None:
    """A storage may outlive a meter that has seen it, and does not hold it."""
    live = meter()
    if live is not None:
        live.forget(address)


_whole: "ContextVar[LiveBytes | _WholeCudaMeter | None]" = ContextVar("whole", default=None)
"""The meter that covers all that is metered now."""


@contextmanager
def metered_as_a_whole(device: torch.device, known: Iterable[Tensor] = ()) -> Iterator[Meter]:
    """Measure all that runs inside, and let `metered` measure parts of it."""
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


@contextmanager
def metered(device: torch.device, known: Iterable[Tensor] = ()) -> Iterator[Meter]:
    """Measure what runs inside; `known` are tensors that are there before."""
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
    """Time what runs inside: no meter of ours looks at its ops."""
    whole = _whole.get()
    if isinstance(whole, LiveBytes):
        with whole.paused():
            yield
    else:
        yield


_has_parts: Callable[[Tensor], bool] = is_traceable_wrapper_subclass


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The storages behind a tensor; those of its parts for a subclass that is made of others.

    None for a tensor without storage, such as a sparse one.
    """
    if _has_parts(tensor) and not isinstance(tensor, FakeTensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = (getattr(tensor, name) for name in names)
        return [s for part in parts if isinstance(part, Tensor) for s in storages_of(part)]
    with suppress(NotImplementedError, RuntimeError):
        return [tensor.untyped_storage()]
    return []


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The size of some tensors on this rank, each storage once."""
    storages = (storage for tensor in tensors for storage in storages_of(tensor))
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())
