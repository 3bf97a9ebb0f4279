"""An activation in the engine's keeping, and the saved tensors that are views of it.

What moves is the storage, once, however many saved tensors show parts of it; they are made again
as views of it when backward asks for them.

Note [What a copy stands for]. Plain autograd holds the storage itself: a saved tensor is what its
part of the storage holds in backward, and its version counter tells whether anybody wrote there. A
copy that was begun at some moment has the bytes of that moment, so it stands for a tensor that is
saved later only if nothing wrote to that tensor in between. The activation therefore remembers the
owner of each counter that it was told of, and the version: Note [Who shares a version counter]. A
tensor with a known owner at the known version is in the copy as it is now. Any other may have been
written to since: the bytes are taken from the storage once more, and copied again. That is right
for what was saved before, too: those tensors either have not changed, or their own counters tell.
Where parts of one storage are written and saved one after the other, each step that is known waits
for the last of them, and copies once.
"""

from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rekindle.errors import RekindleError
from rekindle.torch_private.autograd_graph import grad_fn_of
from rekindle.torch_private.dispatch_modes import below_modes, is_traced, past_modes
from rekindle.torch_private.dynamo_frames import not_compiled
from rekindle.torch_private.storages import storage_again, storage_users
from rekindle.torch_private.version_counters import (
    VersionMark,
    counter_key,
    version_of,
    versions_of,
)

if TYPE_CHECKING:
    from rekindle.offload.derive import Derivation
    from rekindle.offload.device_offloader import Lane
    from rekindle.offload.step_activations import Step
    from rekindle.offload.tiers.base import Copy


_DECIDING = Lock()
"""Held for a moment while it is decided whether bytes stay or go."""


class Activation:
    """One storage that autograd saved, wherever its bytes are now."""

    __slots__ = (
        "__weakref__",
        "_marks",
        "came_to",
        "copy",
        "counts",
        "here",
        "index",
        "is_coming",
        "is_loose",
        "lane",
        "made_from",
        "nbytes",
        "saved_on",
        "sends",
        "step",
        "storage",
        "was_away",
        "writes",
    )

    def __init__(
        self,
        lane: "Lane",
        step: "Step",
        x: Tensor,
        storage: torch.UntypedStorage,
        is_ours: bool = False,
    ) -> None:
        self.lane = lane
        self.copy: Copy | None = None
        self.counts = False
        """Whether its bytes count as being on the device."""
        self.nbytes = 0
        self.step = step
        step.living += 1  # until `__del__` says otherwise: nothing can strike between the two
        self.index = -1
        """Its number among those of the step that may move."""
        self.nbytes = storage.nbytes()
        self.here: Tensor | None = bytes_of(storage, x.device)
        """The bytes on the device, or None while they are away."""
        self.saved_on = lane.tier.place()
        self.came_to: Any = None
        """Where the device worked when the bytes came back."""
        self.sends = 0
        """How many copies were begun; the last one counts."""
        self.made_from: Derivation | None = None
        """What it is made from in backward, in place of being kept or sent."""
        self.is_coming = self.was_away = False
        self.is_loose = not is_ours and grad_fn_of(x) is None
        """Whether nothing shows that an op made it: Note [Whose tensor is it]."""
        self.storage = StorageWeakRef(storage)
        self.writes = 0
        """How often it may have been written to between two saves."""
        mark = VersionMark(x)
        self._marks = {mark.key: mark}
        """What was saved last by each version counter, by the counter's key."""

    def is_known(self, x: Tensor) -> bool:
        """Whether nothing wrote to `x` since it, or a view of the same base, was saved here."""
        mark = self._marks.get(counter_key(x))
        return mark is not None and mark.is_of(x)

    def note_written(self, x: Tensor) -> None:
        """A tensor of this storage is saved, and may have been written to since the last save."""
        self.writes += 1
        mark = VersionMark(x)
        self._marks[mark.key] = mark

    def recall(self, storage: torch.UntypedStorage) -> None:
        """Give up a copy that was begun: the bytes are to be had from the storage, and newer."""
        with _DECIDING:
            copy = self.copy
            self.here = bytes_of(storage, self.lane.device)
            self.is_coming = self.was_away = False
            self.copy = None
        if copy is not None:
            copy.close()
        self.count(here=True)

    def derive_from(self, derivation: "Derivation") -> None:
        """It is neither kept nor sent, but made again."""
        self.made_from = derivation
        self.was_away = True
        self.here = None

    def is_wanted(self) -> bool:
        """Whether it has to be fetched before it can be used."""
        return self.here is None and not self.is_coming and self.held_elsewhere() is None

    def return_away(self) -> None:
        """Let go of bytes that were brought back, or are being brought back."""
        if not self.was_away:
            return
        if self.copy is not None:
            self.copy.drop()
        self.is_coming = False
        self.here = None
        self.count(here=False)

    def count(self, here: bool) -> None:
        """Note that its bytes are on the device, or are not any more."""
        if self.counts != here and self.made_from is None:
            self.counts = here
            self.step.here += self.nbytes if here else -self.nbytes

    def send_by(self, copy: "Copy") -> int:
        """The bytes leave by this copy; the number of the copy, for `let_go`."""
        self.copy = copy
        self.sends += 1
        return self.sends

    def let_go(self, send: int) -> None:
        """The bytes are safe in the copy of this number; threads of a tier say so too."""
        with _DECIDING:
            if self.copy is not None and send == self.sends and not self.was_away:
                self.was_away = True
                self.here = None

    def stay(self) -> bool:
        """Give up leaving, if need be; False if it has left."""
        with _DECIDING:
            if self.was_away:
                return False
            copy = self.copy
            self.copy = None
        if copy is not None:
            copy.close()
        return True

    def is_left_to_us(self) -> bool:
        """Whether nobody but the engine holds the bytes; asked while they are here."""
        storage = storage_again(self.storage)
        # Two are ours: `here`, and the object that was made for counting.
        return storage is None or storage_users(storage) <= 2

    def at_hand(self) -> Tensor | None:
        """The bytes, if they are here or somebody holds them, or can be made from what is."""
        if self.here is not None:
            return self.here
        storage = self.held_elsewhere()
        if storage is not None:
            return bytes_of(storage, self.lane.device)
        made = None if self.made_from is None else self.made_from.at_hand()
        return None if made is None else bytes_of(made.untyped_storage(), self.lane.device)

    def held_elsewhere(self) -> torch.UntypedStorage | None:
        """The storage, if somebody kept it all along, bytes and all."""
        storage = storage_again(self.storage)
        return storage if storage is not None and storage.nbytes() == self.nbytes else None

    def __del__(self) -> None:
        if not hasattr(self, "step"):  # it was interrupted before it was begun
            return
        try:
            self.lane.departed.append((self.step, self.nbytes if self.counts else 0))
        finally:
            if self.copy is not None:
                self.copy.close()


class Saved:
    """A tensor that autograd saved: which part of an activation it shows."""

    __slots__ = (
        "activation",
        "dtype",
        "offset",
        "origin",
        "shape",
        "stride",
        "version",
        "versions",
    )

    def __init__(self, activation: Activation, x: Tensor) -> None:
        self.activation = activation
        self.dtype = x.dtype
        self.shape = x.shape
        self.stride = x.stride()
        self.offset = x.storage_offset()
        self.version = version_of(x)
        self.versions = versions_of(x)
        """Knows of changes in place. Each has its own: a view made by `.data` counts for itself."""
        node = grad_fn_of(x)
        self.origin = node and node.name()

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def depth(self) -> int:
        """How many ops it takes to make it again; 0 if it is somewhere."""
        made_from = self.activation.made_from
        return 0 if made_from is None else made_from.depth

    def get(self) -> Tensor:
        """The tensor as it was, once its bytes are here."""
        if not self.is_unchanged():
            found = self.versions._version
            raise changed_in_place(self.shape, self.dtype, self.version, found, self.origin)
        return self._of(self.activation.lane.ask(self.activation))

    def is_unchanged(self) -> bool:
        return self.versions._version == self.version

    def at_hand(self) -> Tensor | None:
        """The tensor, if that takes no waiting and nobody is to know."""
        data = self.activation.at_hand()
        return None if data is None else self._of(data)

    def _of(self, data: Tensor) -> Tensor:
        """The part that it shows."""
        with below_modes():
            view = torch.empty(0, dtype=self.dtype, device=data.device)
            view.set_(data.untyped_storage(), self.offset, self.shape, self.stride)
            same = self.versions.detach()  # whoever changes what is given out is noticed as well
            same.data = view
            return same


class Kept:
    """A tensor that autograd saved and that stays as it is."""

    __slots__ = ("tensor", "version")
    depth = 0

    @not_compiled
    def __init__(self, x: Tensor) -> None:
        # An output of the op that saves it would hold the op, and the op it: a cycle.
        self.tensor = x if grad_fn_of(x) is None else _alias(x)
        self.version = version_of(x)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def get(self) -> Tensor:
        """The tensor, if nobody changed it since."""
        if not self.is_unchanged():
            x = self.tensor
            raise changed_in_place(x.shape, x.dtype, self.version, x._version)
        return self.tensor

    def is_unchanged(self) -> bool:
        return self.version == version_of(self.tensor)

    def at_hand(self) -> Tensor | None:
        """The tensor, as it is now."""
        return self.tensor.detach()


def _alias(x: Tensor) -> Tensor:
    """The tensor without its graph, made past any mode but one that makes a graph of what runs.

    In a replay it stands for what the engine takes, and no mode sees what the engine does.
    """
    return x.detach() if is_traced() else past_modes(Tensor.detach, x)


class Source(Protocol):
    """A saved tensor: it can be had in backward, and others may be made from it."""

    @property
    def depth(self) -> int:
        """How many ops it takes to make it again; 0 if it is somewhere."""

    @property
    def nbytes(self) -> int: ...

    def is_unchanged(self) -> bool: ...

    def get(self) -> Tensor: ...

    def at_hand(self) -> Tensor | None: ...


@not_compiled
def unpack(saved: Source) -> Tensor:
    """What autograd asks for a saved tensor."""
    return saved.get()


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """A storage as a tensor of bytes."""
    whole = torch.empty(0, dtype=torch.uint8, device=device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))


def may_move(x: Tensor, min_bytes: int) -> bool:
    """Whether a saved tensor is an activation that can be put together again from its bytes.

    Note [Whose tensor is it]. A parameter, or a view of one, is never moved; nor is any other leaf
    that requires a gradient, for whoever gets the gradient holds it. A tensor that no op of
    autograd made may be a buffer, a mask that all layers share, the batch; or what an op made
    beside its result, such as a dropout mask. It is moved only when it turns out that nobody else
    holds it, and not before the op that saves it has returned: it may be about to be filled
    (`rrelu`'s noise).
    """
    if type(x) is not Tensor or x.layout is not torch.strided:
        return False
    if x.dtype is torch.int64 and x.numel() == 1:  # a number, or a ticket of a compiled graph's
        return False
    if x.is_conj() or x.is_neg() or x.is_quantized or x.is_nested or x.is_inference():
        return False
    base: Any = x if x._base is None else x._base
    if isinstance(base, nn.Parameter) or (base.requires_grad and base.is_leaf):
        return False
    storage = x.untyped_storage()
    if storage.nbytes() < max(min_bytes, 1):
        return False
    return _has_memory(storage)


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether there is anything to copy; what a transform of `torch.func` wraps has nothing."""
    try:
        return storage.data_ptr() != 0
    except RuntimeError:
        return False


def changed_in_place(
    shape: torch.Size, dtype: torch.dtype, expected: int, found: int, origin: str | None = None
) -> RekindleError:
    """The error that autograd raises itself for a tensor without hooks."""
    made = f", made by {origin}," if origin else ""
    return RekindleError(
        "A tensor needed for gradient computation has been modified by an inplace operation: "
        f"{dtype} {list(shape)}{made} is at version {found}; expected version {expected}. "
        "It was saved for backward where rekindle holds it, and changed after that. Run the op "
        "that changes it out of place, or on a clone; torch.autograd.set_detect_anomaly(True) "
        "shows the op whose gradient needs it."
    )
