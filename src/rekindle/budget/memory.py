"""How much memory is in use on a device, now and at the peak: exact bytes, on a CPU too."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(Protocol):
    """Bytes in use above what there was at the start."""

    def now(self) -> int:
        """In use now."""

    def peak(self) -> int:
        """The most since the last `reset`."""

    def reset(self) -> None:
        """Begin a new peak."""


class _CudaMeter:
    """What torch's allocator says."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = torch.cuda.memory_allocated(device)
        self.reset()

    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._start

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._start

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class LiveBytes(TorchDispatchMode):
    """Sees every op, and adds up the storages that ops made and that are alive, each once.

    Scratch memory inside one op is not seen.
    """

    supports_higher_order_operators = True

    def __init__(self, not_counted: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = self._peak = 0
        storages = map(storage_of, not_counted)
        self._sizes = {storage._cdata: 0 for storage in storages if storage is not None}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def now(self) -> int:
        return self._now

    def peak(self) -> int:
        return self._peak

    def reset(self) -> None:
        self._peak = self._now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is None:
            return
        address = storage._cdata
        if address in self._sizes:
            return
        self._sizes[address] = storage.nbytes()
        self._now += storage.nbytes()
        self._peak = max(self._peak, self._now)
        weakref.finalize(storage, self._discount, address)

    def _discount(self, address: int) -> None:
        self._now -= self._sizes.pop(address)


@contextmanager
def metered(device: torch.device, known: Iterable[Tensor] = ()) -> Iterator[Meter]:
    """Measure what runs inside; tensors that are known are there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        yield _CudaMeter(device)
    else:
        with LiveBytes(known) as live:
            yield live


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Where a tensor's bytes are; None for one without, as a sparse one or some subclasses."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The size of some tensors, each storage once."""
    storages = (storage for tensor in tensors if (storage := storage_of(tensor)) is not None)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
