"""Tensors that a recorded region holds from forward to backward, and copies of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rekindle.errors import CheckpointError
from rekindle.offload.saved_tensors import KeptTensor, OffloadedTensor
from rekindle.regions.recompute import slots
from rekindle.regions.recompute.collect import Collector
from rekindle.regions.selective.op_addresses import is_parameter
from rekindle.torch_private.dispatch_modes import unseen
from rekindle.torch_private.grad_mode import without_grad
from rekindle.torch_private.version_counters import detached, version_of, with_versions

Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""A pair of saved-tensor hooks: `pack` takes a tensor, `unpack` gives it back."""


class RecordedSlot(ABC):
    """A saved tensor as a recorded region packs it."""

    __slots__ = ()

    @abstractmethod
    def note_just_saved(self) -> None:
        """Tell the region that a region inside it saves the tensor again."""


class HeldTensor:
    """A tensor that is held from forward to backward, here or by somebody else's hooks."""

    __slots__ = ("_nbytes", "_packed", "_unpack", "is_elsewhere", "made_by", "version")

    def __init__(self, tensor: Tensor, made_by: Any, hooks: Hooks | None) -> None:
        self.made_by = made_by
        """The op that made it, or the name it was given; None if it comes from outside."""
        self.version = version_of(tensor)
        self.is_elsewhere = hooks is not None
        """True if somebody's hooks hold it, so that it takes something to get it."""
        if hooks is None:
            # What an op made gets its `grad_fn` later, and would lead back to who holds it.
            self._packed: Any = tensor if is_parameter(tensor) else unseen(detached, tensor)
            self._unpack: Callable[[Any], Tensor] | None = None
        else:
            self._nbytes = nbytes_of(tensor)
            self._packed = without_grad(with_versions, hooks[0], tensor)
            self._unpack = hooks[1]
            if isinstance(self._packed, Tensor):
                self.version = version_of(self._packed)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor if the region made it; 0 if it comes from outside, and is there."""
        if self.made_by is None:
            return 0
        return self._nbytes if self.is_elsewhere else nbytes_of(self._packed)

    @property
    def can_have_views(self) -> bool:
        """True if views of it may be held as well; a parameter's memory may be exchanged."""
        return not self.is_elsewhere and not is_parameter(self._packed)

    @property
    def slot(self) -> RecordedSlot | None:
        """The slot of the region around that holds it, if one does."""
        if not self.is_elsewhere or not isinstance(self._packed, RecordedSlot):
            return None
        return self._packed

    def on_device(self) -> Tensor | None:
        """The tensor, unless somebody's hooks have it."""
        if isinstance(self._packed, KeptTensor):  # the offload engine keeps it where it is
            return self._packed.tensor
        return None if self.is_elsewhere else self._packed

    def copied(self, tensor: Tensor | None, hooks: Hooks | None) -> "HeldTensor | None":
        """A copy to hold from now on, since the tensor is about to change; None if none is due.

        A region around that holds it copies it itself. One that is replayed whole counts what it
        is given: it holds nothing in forward, and in its replay the copy takes the place of what
        it was given. What other hooks hold may be a copy already, or may be the very `tensor` that
        they were given: a copy stays here, for they may count as well.
        """
        if isinstance(self._packed, RecordedSlot) or self._unpack is slots.unpack:
            return None
        replay = getattr(self._unpack, "__self__", None)
        if isinstance(replay, Collector):
            if tensor is not None:
                replay.copy_before_change(tensor, copy_of)
            return None
        if isinstance(self._packed, OffloadedTensor):
            tensor = self._packed.without_waiting() if self._packed.is_unchanged() else None
        else:
            here = self.on_device()
            tensor, hooks = (tensor, None) if here is None else (here, hooks)
        return None if tensor is None else HeldTensor(copy_of(tensor), self.made_by, hooks)

    def get(self) -> Tensor:
        """The tensor as the region used it; an error if it has been changed since."""
        tensor: Tensor = self._packed
        if self._unpack is not None:
            if isinstance(tensor, Tensor):  # perhaps the very tensor that hooks were given
                self._check_version(tensor)
            return self._unpack(tensor)
        if type(tensor) is not Tensor and is_parameter(tensor) and _has_no_memory(tensor):
            raise CheckpointError(
                f"A parameter, {tensor.dtype} {list(tensor.shape)}, has no memory any more: it was "
                "sharded again after the region used it, and what the region has to make again "
                "depends on it. Shard the region as one unit, so that it is gathered for its "
                "backward, or keep the op that uses the parameter."
            )
        self._check_version(tensor)
        return tensor

    def _check_version(self, tensor: Tensor) -> None:
        """Raise if the tensor was changed in place."""
        if version_of(tensor) != self.version:
            raise CheckpointError(
                f"{_described(self.made_by)}, {tensor.dtype} {list(tensor.shape)}, was changed in "
                f"place after the region used it: it is at version {version_of(tensor)}; expected "
                f"version {self.version}. "
                "What the region has to make again depends on it. Change a clone of it instead."
            )


def _has_no_memory(parameter: Tensor) -> bool:
    """True if a parameter's memory was given back, as FSDP does."""
    try:
        return parameter.numel() > 0 and parameter.untyped_storage().nbytes() == 0
    except (NotImplementedError, RuntimeError):
        return False


def _described(made_by: Any) -> str:
    if made_by is None:
        return "A tensor from outside the region, or one that the region changed in place"
    return f"What was named {made_by!r}" if isinstance(made_by, str) else f"What {made_by} made"


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; of a view, of those that it shows."""
    return tensor.numel() * tensor.element_size()


def copy_of(tensor: Tensor) -> Tensor:
    """A copy with the same strides, which decide the order of sums."""
    tensor = tensor.detach()
    copy = tensor.clone()
    if tensor.layout is not torch.strided or copy.stride() == tensor.stride():
        return copy
    if 0 in tensor.stride():  # some of its elements are one in memory
        whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        return whole.clone().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)
