"""Version counters: when two tensors in one storage surely hold what was there before.

Note [Who shares a version counter]. A version counter tells of writes to the tensors that share it,
and of no others. A view shares the counter of its base, so two tensors with one base hold the same
bytes as long as the version is the same. Equal storage says nothing: chunks from `unsafe_chunk` and
`unsafe_split` (the cells of recurrent modules are made of them), results of `.data` and of `set_`,
and NumPy and DLPack views lie in one storage, and each has a counter of its own. One of them may be
at the version of another and have been written to in between. What `detach()` returns does share
its counter, but nothing shows it: it counts as a tensor with a counter of its own. That costs a
copy now and then, and is never wrong.

Every place that reasons by version counter, and what makes it right:

- `offload.device_offloader` and `offload.activation` ask whether a copy that was begun stands for a
  tensor that is saved later: by `VersionMark`. Note [What a copy stands for].
- `regions.saved_indices` asks whether a result that is made again stands for another tensor that is
  saved: by `VersionMark` as well.
- `offload.derive` takes version 0 of a tensor that fills its storage for the result of the op
  behind its `grad_fn`. Note [When a node can be trusted].
- `Saved`, `Kept`, `HeldTensor`, `Inputs`, `_CachedTensor`, `_DroppedTensor` and the slots of a
  replay ask of one tensor whether *it* was changed: each looks at the counter of that tensor, or of
  an alias that shares it (`detached`, `version_alias`). Chunks do not overlap, so a write to one of
  them changes no other.
- `regions.selective.tensor_table` does not ask: an op that changes a tensor, by its schema, changes
  everything in the same storage.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rekindle.torch_private.grad_mode import below_autograd
from rekindle.torch_private.tensor_identity import WeakTensor, tensor_key


def version_of(tensor: Tensor) -> int:
    """A tensor's version counter, or -1: inference tensors have none.

    Tried on torch 2.11 and 2.13. `_version` is used all over the field and has no public form. Goes
    when it has one.
    """
    try:
        return tensor._version
    except RuntimeError:
        return -1


def set_version(tensor: Tensor, version: int) -> None:
    """Set a tensor's version counter.

    Tried on torch 2.11 and 2.13. The public form, `torch.autograd.graph.increment_version`, adds
    one. Goes when there is one that takes a number.
    """
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded


def versions_excluded() -> bool:
    """True if views that are made now would not share their version counter.

    Tried on torch 2.11 and 2.13. Goes when `with_versions` does.
    """
    return _is_excluded(_VERSIONS)


def with_versions(function: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """Call a function so that views it makes share their version counter.

    Inside a dispatch mode they would not: it runs below the part of autograd that sees to it. Tried
    on torch 2.11 and 2.13. Goes when views made inside a mode share it: pytorch/pytorch#96319.
    """
    was = _is_excluded(_VERSIONS)
    try:
        _set_excluded(_VERSIONS, False)
        return function(tensor)
    finally:
        _set_excluded(_VERSIONS, was)


_detach = torch.Tensor.detach


def detached(tensor: Tensor) -> Tensor:
    """`tensor.detach()` with the same version counter, also inside a dispatch mode.

    It works as well for one of several views whose base was changed in place, at which autograd
    would raise. Tried on torch 2.11 and 2.13. Goes when `with_versions` does.
    """
    try:
        alias: Tensor = with_versions(_detach, tensor)
    except RuntimeError:
        with below_autograd():
            alias = with_versions(_detach, tensor)
    return alias


class _EmptyTensors(dict[torch.device, Tensor]):
    """A tensor without data on each device."""

    def __missing__(self, device: torch.device) -> Tensor:
        self[device] = torch.empty(0, dtype=torch.uint8, device=device)
        return self[device]


_empty_on = _EmptyTensors()


def version_alias(tensor: Tensor) -> Tensor:
    """A tensor without data that shares the version counter of `tensor`.

    Tried on torch 2.11 and 2.13. Goes when a version counter can be held by itself.
    """
    counter = tensor.detach()
    counter.data = _empty_on[tensor.device]
    return counter


def counter_owner(tensor: Tensor) -> Tensor:
    """The tensor whose version counter `tensor` counts with: its base, or itself.

    Tried on torch 2.11 and 2.13. Goes when `_base` has a public form.
    """
    base = tensor._base
    return tensor if base is None else base


def counter_key(tensor: Tensor) -> int:
    """A number that no other living tensor's version counter has.

    Tried on torch 2.11 and 2.13. Goes when `tensor_key` does.
    """
    return tensor_key(counter_owner(tensor))


class VersionMark:
    """A tensor at a version, to ask later tensors whether they hold the same bytes.

    Tried on torch 2.11 and 2.13. Goes when `counter_key` does.
    """

    __slots__ = ("_owner", "key", "version")

    def __init__(self, tensor: Tensor) -> None:
        owner = counter_owner(tensor)
        self._owner = WeakTensor(owner)  # so that the key stays its own
        self.key = tensor_key(owner)
        self.version = version_of(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        """True if `tensor` shares the counter, and nothing was written since."""
        return self.version == version_of(tensor) != -1 and self.key == counter_key(tensor)
