"""Counts the tensors, regions and slots that are alive."""

import gc
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def count(kind: type) -> int:
    return sum(type(thing) is kind for thing in gc.get_objects())


class Storages(TorchDispatchMode):
    """Every storage that an op made while this was entered, by a weak reference."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            if storage._cdata not in given:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self) -> list[int]:
        """Bytes of each storage that still lives."""
        return sorted(size for weak, size in self._made.values() if not weak.expired())


def storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def five(x: Tensor) -> Tensor:
    """Five ops; autograd holds `x` and two activations of its size, exp's and tanh's results."""
    return x.sin().exp().cos().tanh().sin()
