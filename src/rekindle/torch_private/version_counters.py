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

- `offload.lane` and `offload.activation` ask whether a copy that was begun stands for a tensor that
  is saved later: by `VersionMark`. Note [What a copy stands for].
- `selective.by_save` asks whether a result that is made again stands for another tensor that is
  saved: by `VersionMark` as well.
- `offload.derive` takes version 0 of a tensor that fills its storage for the result of the op
  behind its `grad_fn`. Note [When a node tells the whole truth].
- `Saved`, `Kept`, `Held`, `Inputs`, `_Aside`, `_DroppedPart` and the slots of a replay ask of one
  tensor whether *it* was changed: each looks at the counter of that tensor, or of an alias that
  shares it (`internals.detached`, `internals.versions_of`). Chunks do not overlap, so a write to
  one of them changes no other.
- `selective.book` does not ask: an op that changes a tensor, by its schema, changes everything in
  the same storage.
"""

from torch import Tensor

from rekindle.torch_private.internals import WeakTensor, tensor_key, version_of


def counter_owner(tensor: Tensor) -> Tensor:
    """The tensor whose version counter `tensor` counts with: its base, or itself."""
    base = tensor._base
    return tensor if base is None else base


def counter_key(tensor: Tensor) -> int:
    """A number that no other living tensor's version counter has."""
    return tensor_key(counter_owner(tensor))


class VersionMark:
    """A tensor at a version: tells of tensors that come later whether they hold the same bytes."""

    __slots__ = ("_owner", "key", "version")

    def __init__(self, tensor: Tensor) -> None:
        owner = counter_owner(tensor)
        self._owner = WeakTensor(owner)  # so that the key stays its own
        self.key = tensor_key(owner)
        self.version = version_of(tensor)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether `tensor` shares the counter, and nothing was written since."""
        return self.version == version_of(tensor) != -1 and self.key == counter_key(tensor)
