"""Derivations: activations that one cheap op makes again from tensors that are saved anyway.

The output of an elementwise op is often saved by the op after it, while the op itself has saved all
of its inputs: `silu(gate) * up` is, and so is a norm's product with its weight. To make such an
activation again takes the device a hundredth of the time in which a link could carry it. So it is
neither kept nor copied out: autograd's own node shows which op made it, and from what.

Note [When a node can be trusted]. A tensor at version 0 is what the op behind its `grad_fn`
made: whoever changes a tensor in place either becomes its `grad_fn` or moves its version. The ops
below make the same bits whenever they run on the same bits in the same layout. Only `.data` goes
behind autograd's back; so the first time that a step is seen, each of these is made at once and
compared with what it is to replace.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rekindle.errors import RekindleError
from rekindle.offload.activation import as_bytes
from rekindle.offload.saved_tensors import SavedTensor
from rekindle.torch_private.autocast import any_autocast
from rekindle.torch_private.autograd_graph import saved_by
from rekindle.torch_private.grad_mode import without_grad
from rekindle.torch_private.torch_function import torch_function_disabled
from rekindle.torch_private.version_counters import version_of

_OpOfNode = Callable[[Any], Callable[..., Tensor]]
"""Returns the op that a node stands for, given the node: some have settings."""

_OPS: dict[str, tuple[_OpOfNode, tuple[str, ...]]] = {
    "DivBackward0": (lambda _: torch.div, ("self", "other")),
    "GeluBackward0": (
        lambda node: partial(functional.gelu, approximate=node._saved_approximate),
        ("self",),
    ),
    "HardswishBackward0": (lambda _: functional.hardswish, ("self",)),
    "MulBackward0": (lambda _: torch.mul, ("self", "other")),
    "SiluBackward0": (lambda _: functional.silu, ("self",)),
}
"""By the name of the node of an elementwise op: the op, and the inputs that the node saves."""


_MAX_READ_RATIO = 4
"""Largest ratio of bytes read to bytes made: reading is what takes the time."""
_PIECE = 16 * 2**20
"""Bytes that are compared at a time: comparing takes memory too."""
_MAX_DEPTH = 2
"""Longest chain of ops: an activation may be derived from one that is derived, and no further."""


class Derivation:
    """One op and the saved tensors that it makes an activation from."""

    __slots__ = ("_inputs", "_op", "_shape", "_stride", "_threads", "depth", "dtype", "name")

    def __init__(
        self, name: str, op: Callable[..., Tensor], inputs: list[SavedTensor], made: Tensor
    ) -> None:
        self.name = name
        self._op = op
        self._threads = torch.get_num_threads()
        """Number of CPU threads: work is cut up by it, and the ends of pieces round accordingly."""
        self._inputs = inputs
        self.dtype = made.dtype
        self._shape = made.shape
        self._stride = made.stride()
        self.depth = 1 + max(source.depth for source in inputs)

    def gives(self, data: Tensor) -> bool:
        """True if the op gives these bytes; False also if that cannot be tried now."""
        try:
            made = self.without_waiting()
            if made is None:
                return False
            again = as_bytes(made.untyped_storage(), made.device)
            pieces = zip(data.split(_PIECE), again.split(_PIECE), strict=True)
            return all(torch.equal(one, other) for one, other in pieces)
        except torch.OutOfMemoryError:
            return False

    def without_waiting(self) -> Tensor | None:
        """Returns the tensor if all its inputs are to be had without waiting; else None."""
        inputs = [x for source in self._inputs if (x := source.without_waiting()) is not None]
        return self._make(inputs) if len(inputs) == len(self._inputs) else None

    def make(self, cure: str) -> Tensor:
        """Returns the tensor, made again. `cure` ends the message of an error."""
        try:
            return self._make([source.get() for source in self._inputs])
        except RekindleError as error:
            raise RekindleError(
                f"{error} Another activation was to be made from it again; {cure}"
            ) from None

    def _make(self, inputs: list[Tensor]) -> Tensor:
        kind = inputs[0].device.type
        threads, is_cast = (
            torch.get_num_threads(),
            any_autocast() and torch.is_autocast_enabled(kind),
        )
        try:
            try:
                if is_cast:  # what was saved has been cast already
                    torch.set_autocast_enabled(kind, False)
                if kind == "cpu" and threads != self._threads:
                    torch.set_num_threads(self._threads)
                with torch_function_disabled():
                    return without_grad(self._run_op, inputs)
            finally:  # each begins with a call of C, before which nothing can strike
                if kind == "cpu" and threads != self._threads:
                    torch.set_num_threads(threads)
        finally:
            if is_cast:
                torch.set_autocast_enabled(kind, True)

    def _run_op(self, inputs: list[Tensor]) -> Tensor:
        made = self._op(*inputs)
        if made.stride() != self._stride:
            made = torch.empty_strided(
                self._shape, self._stride, dtype=made.dtype, device=made.device
            ).copy_(made)
        return made


def is_made_by_its_node(x: Tensor) -> bool:
    """True if a saved tensor, or its base if it is a view, has a node that made it."""
    return (x if x._base is None else x._base).grad_fn is not None


def derivation_of(
    x: Tensor, storage: torch.UntypedStorage, may_derive_from: Callable[[Any], bool]
) -> Derivation | None:
    """Returns how a cheap op makes the whole storage of a saved tensor again; None if none does.

    `may_derive_from` says of a packed input whether an activation may be derived from it.
    """
    made = x if x._base is None else x._base
    node = made.grad_fn
    # Note [When a node can be trusted]
    if node is None or version_of(made) != 0 or node.name() not in _OPS:
        return None
    if made.numel() * made.element_size() != storage.nbytes():
        return None
    op, names = _OPS[node.name()]
    inputs: list[SavedTensor] = [saved_by(node, name) for name in names]
    if not all(may_derive_from(source) and source.is_unchanged() for source in inputs):
        return None
    if sum(source.nbytes for source in inputs) > _MAX_READ_RATIO * storage.nbytes():
        return None
    derivation = Derivation(node.name(), op(node), inputs, made)
    return derivation if derivation.depth <= _MAX_DEPTH else None
