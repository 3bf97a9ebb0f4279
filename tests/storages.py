"""A meter to compare ours with: it looks at the size of each storage after every op."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rekindle.planner.instruments.memory_meter import storages_of


class PolledBytes(TorchDispatchMode):
    """Bytes of all storages that ops are given or return, but for those of some tensors."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._known = [storage for tensor in known for storage in storages_of(tensor)]
        self._alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self._alive.update({storage._cdata: storage for storage in storages_of(leaf)})
        known = {storage._cdata for storage in self._known}
        alive = (storage for address, storage in self._alive.items() if address not in known)
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))
        return result
