"""Objects that autograd holds in the place of saved tensors, and that give them to backward."""

from typing import Protocol

import torch
from torch import Tensor

from rekindle.errors import RekindleError
from rekindle.offload.activation import Activation
from rekindle.torch_private.autograd_graph import grad_fn_of
from rekindle.torch_private.dispatch_modes import below_modes, is_traced, past_modes
from rekindle.torch_private.dynamo_frames import not_compiled
from rekindle.torch_private.version_counters import version_alias, version_of


class SavedTensor(Protocol):
    """A saved tensor: backward gets it, and other saved tensors may be derived from it."""

    @property
    def depth(self) -> int:
        """Number of ops that it takes to derive the tensor; 0 if its bytes are kept somewhere."""

    @property
    def nbytes(self) -> int: ...

    def is_unchanged(self) -> bool:
        """True if nobody wrote to the tensor since it was saved."""

    def get(self) -> Tensor:
        """Returns the tensor for backward, after a copy back or a derivation if need be."""

    def without_waiting(self) -> Tensor | None:
        """Returns the tensor if that takes no wait, without counting it as used; else None."""


class OffloadedTensor:
    """A saved tensor that is a view of an activation in an offloader's hands."""

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
        self.versions = version_alias(x)
        """Shares the version counter of `x`. A view made by `.data` has a counter of its own."""
        node = grad_fn_of(x)
        self.origin = node and node.name()

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def depth(self) -> int:
        derivation = self.activation.derivation
        return 0 if derivation is None else derivation.depth

    def get(self) -> Tensor:
        if not self.is_unchanged():
            found = self.versions._version
            raise written_since_saved(self.shape, self.dtype, self.version, found, self.origin)
        return self._view_of(self.activation.offloader.load(self.activation))

    def is_unchanged(self) -> bool:
        return self.versions._version == self.version

    def without_waiting(self) -> Tensor | None:
        data = self.activation.without_waiting()
        return None if data is None else self._view_of(data)

    def _view_of(self, data: Tensor) -> Tensor:
        """Returns the part of the activation's bytes that this tensor is."""
        with below_modes():
            view = torch.empty(0, dtype=self.dtype, device=data.device)
            view.set_(data.untyped_storage(), self.offset, self.shape, self.stride)
            same = self.versions.detach()  # whoever changes what is given out is noticed as well
            same.data = view
            return same


class KeptTensor:
    """A saved tensor that stays as it is, on its device."""

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
        if not self.is_unchanged():
            x = self.tensor
            raise written_since_saved(x.shape, x.dtype, self.version, x._version)
        return self.tensor

    def is_unchanged(self) -> bool:
        return self.version == version_of(self.tensor)

    def without_waiting(self) -> Tensor | None:
        return self.tensor.detach()


def _alias(x: Tensor) -> Tensor:
    """Returns the tensor without its graph, made past any mode but one that traces a graph.

    In a replay it is what is kept, and no mode sees how.
    """
    return x.detach() if is_traced() else past_modes(Tensor.detach, x)


@not_compiled
def unpack(saved: SavedTensor) -> Tensor:
    """The unpack hook: returns the tensor that autograd saved."""
    return saved.get()


def written_since_saved(
    shape: torch.Size, dtype: torch.dtype, expected: int, found: int, origin: str | None = None
) -> RekindleError:
    """Returns the error that autograd raises itself for a saved tensor without hooks."""
    made = f", made by {origin}," if origin else ""
    return RekindleError(
        "A tensor needed for gradient computation has been modified by an inplace operation: "
        f"{dtype} {list(shape)}{made} is at version {found}; expected version {expected}. "
        "It was saved for backward where rekindle holds it, and changed after that. Run the op "
        "that changes it out of place, or on a clone; torch.autograd.set_detect_anomaly(True) "
        "shows the op whose gradient needs it."
    )
