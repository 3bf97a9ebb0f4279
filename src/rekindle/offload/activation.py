"""Activations: the storages that autograd's saved tensors are views of.

The unit that moves is the storage, once, however many saved tensors show parts of it; backward gets
them as views of it again.

Note [What a copy stands for]. Plain autograd holds the storage itself: a saved tensor is what its
part of the storage holds in backward, and its version counter shows whether anybody wrote there. A
copy that was begun at some moment has the bytes of that moment, so it stands for a tensor that is
saved later only if nothing wrote to that tensor in between. The activation therefore remembers the
owner of each counter of its saved tensors, and the version: Note [Who shares a version counter]. A
tensor with a known owner at the known version is in the copy as it is now. Any other may have been
written to since: the bytes are taken from the storage once more, and copied again. That is right
for what was saved before, too: those tensors either have not changed, or their own counters show
it. Where parts of one storage are written and saved one after the other, each step that is known
waits for the last of them, and copies once.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rekindle.offload.residency import AWAY, MovableBytes
from rekindle.torch_private.autograd_graph import grad_fn_of
from rekindle.torch_private.storages import storage_from_reference, storage_users
from rekindle.torch_private.version_counters import VersionMark, counter_key

if TYPE_CHECKING:
    from rekindle.offload.device_offloader import DeviceOffloader
    from rekindle.offload.step_activations import StepActivations


class Activation(MovableBytes):
    """One storage that autograd saved, in any state of `Residency`."""

    __slots__ = (
        "__weakref__",
        "_marks",
        "index",
        "is_counted",
        "nbytes",
        "offloader",
        "owner_unknown",
        "returned_on",
        "saved_on",
        "step",
        "storage",
        "writes",
    )

    def __init__(
        self,
        offloader: "DeviceOffloader",
        step: "StepActivations",
        x: Tensor,
        storage: torch.UntypedStorage,
        exclusive: bool = False,
    ) -> None:
        super().__init__(as_bytes(storage, x.device))
        self.offloader = offloader
        self.is_counted = False
        """True if its bytes are in the step's `device_bytes`."""
        self.nbytes = 0
        self.step = step
        step.alive += 1  # until `__del__` says otherwise: nothing can strike between the two
        self.index = -1
        """Its number among the activations of the step that can be copied out."""
        self.nbytes = storage.nbytes()
        self.saved_on = offloader.tier.current_stream()
        """The stream on which it was saved."""
        self.returned_on: Any = None
        """The stream on which its bytes came back."""
        self.owner_unknown = not exclusive and grad_fn_of(x) is None
        """True if nothing shows that an op made it: Note [Whose tensor is it]."""
        self.storage = StorageWeakRef(storage)
        self.writes = 0
        """Number of times that it may have been written to between two saves."""
        mark = VersionMark(x)
        self._marks = {mark.key: mark}
        """Version of the tensor saved last for each version counter, by the counter's key."""

    def is_known(self, x: Tensor) -> bool:
        """True if nothing wrote to `x` since it, or a view of the same base, was saved here."""
        mark = self._marks.get(counter_key(x))
        return mark is not None and mark.is_of(x)

    def note_written(self, x: Tensor) -> None:
        """Note that a view `x` is saved which may have been written to since the last save."""
        self.writes += 1
        mark = VersionMark(x)
        self._marks[mark.key] = mark

    def reread(self, storage: torch.UntypedStorage) -> None:
        """Discard the copy, and take the newer bytes from the storage."""
        self.overwrite(as_bytes(storage, self.offloader.device))
        self.count(on_device=True)

    def evict(self) -> None:
        super().evict()
        if self.residency is AWAY:
            self.count(on_device=False)

    def count(self, on_device: bool) -> None:
        """Add its bytes to the step's bytes on the device, or subtract them; each once."""
        if self.is_counted != on_device and self.derivation is None:
            self.is_counted = on_device
            self.step.device_bytes += self.nbytes if on_device else -self.nbytes

    def needs_return(self) -> bool:
        """True if a copy back has to begin before the bytes can be used."""
        return self.residency is AWAY and self.storage_held_elsewhere() is None

    def is_held_by_us_alone(self) -> bool:
        """True if only the offloader holds the bytes; valid while they are on the device."""
        storage = storage_from_reference(self.storage)
        # Two users are ours: `data`, and the object that was made for counting.
        return storage is None or storage_users(storage) <= 2

    def without_waiting(self) -> Tensor | None:
        """Returns the bytes if they are on the device, or derived from what is there; else None."""
        data = self.data
        if data is not None:
            return data
        storage = self.storage_held_elsewhere()
        if storage is not None:
            return as_bytes(storage, self.offloader.device)
        made = None if self.derivation is None else self.derivation.without_waiting()
        return None if made is None else as_bytes(made.untyped_storage(), self.offloader.device)

    def storage_held_elsewhere(self) -> torch.UntypedStorage | None:
        """Returns the storage if somebody else kept it all along, bytes and all; else None."""
        storage = storage_from_reference(self.storage)
        return storage if storage is not None and storage.nbytes() == self.nbytes else None

    def __del__(self) -> None:
        if not hasattr(self, "step"):  # it was interrupted before it was begun
            return
        try:
            self.offloader.dead.append((self.step, self.nbytes if self.is_counted else 0))
        finally:
            if self.copy is not None:
                self.copy.close()


def as_bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """Returns a storage as a tensor of bytes."""
    whole = torch.empty(0, dtype=torch.uint8, device=device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))
