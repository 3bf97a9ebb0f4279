"""The outputs of blocks in a step: which live on, and which get a gradient.

A block may return more than the step uses, such as attention's weights beside its result. What
nobody uses is freed before the backward, and gets no gradient: a block that is run alone goes
without both, too. Nothing here holds a tensor.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage

from rekindle.planner.instruments.memory_meter import bytes_of, storages_of
from rekindle.planner.nested_tensors import tensors_in
from rekindle.torch_private.autograd_graph import grad_fn_of, nodes_so_far, sequence_number
from rekindle.torch_private.storages import storage_key


class OutputUse(NamedTuple):
    """A step's use of one tensor of a block's output."""

    lives: bool = True
    """True if it is there when the backward begins, whoever holds it."""
    has_gradient: bool = True


class _WeakStorage(NamedTuple):
    storage: weakref.ref[UntypedStorage]
    key: int
    nbytes: int


@dataclass
class _Part:
    """One tensor of an output."""

    storages: list[_WeakStorage]
    node: Any
    """The node that made it, until the forward ends."""
    number: int
    """Its number among the results of the node."""
    lives: bool = True
    has_gradient: bool = True


class BlockOutput:
    """The output of one call of a block, while a step runs.

    `on_gradient` is called with each gradient that one of its tensors gets in the step's backward;
    `now` returns the bytes in use.
    """

    def __init__(
        self, out: Any, on_gradient: Callable[[Tensor], bool], now: Callable[[], int]
    ) -> None:
        self.begins: int | None = None
        """Bytes when its block's backward began, with all of the output that lives, and without its
        gradient; None before that."""
        self._on_gradient = on_gradient
        self._now = now
        self._after = nodes_so_far()
        self._parts = []
        for tensor in tensors_in(out):
            storages = [_weak(storage) for storage in storages_of(tensor)]
            self._parts.append(_Part(storages, grad_fn_of(tensor), tensor.output_nr))
            if tensor.requires_grad:
                tensor.register_hook(self._note_gradient)

    def uses(self) -> tuple[OutputUse, ...]:
        """The step's use of each tensor of the output."""
        return tuple(OutputUse(part.lives, part.has_gradient) for part in self._parts)

    def note_living(self) -> bool:
        """Note which tensors live: the forward has ended. Returns whether all of them do."""
        for part in self._parts:
            part.lives = not part.storages or any(_is_alive(each) for each in part.storages)
        return all(part.lives for part in self._parts)

    def note_readers(self, readers: "_Readers") -> None:
        """Note which tensors that do not live get no gradient: no op after the block reads them."""
        for part in self._parts:
            if not part.lives and part.node is not None:
                newest = readers.get((part.node, part.number), -1)
                part.has_gradient = newest >= self._after

    def forget_graph(self) -> None:
        """Hold no node any more."""
        for part in self._parts:
            part.node = None

    def _note_gradient(self, gradient: Tensor) -> None:
        if not self._on_gradient(gradient):
            return
        freed = {
            each.key: each.nbytes
            for part in self._parts
            for each in part.storages
            if part.lives and not _is_alive(each)
        }
        begins = self._now() - bytes_of([gradient]) + sum(freed.values())
        self.begins = begins if self.begins is None else min(begins, self.begins)


_Readers = dict[tuple[Any, int], int]
"""For each result that a graph reads, by node and number: the newest op that reads it."""


def end_forward(outputs: Iterable[BlockOutput], loss: Tensor) -> None:
    """Note what becomes of the outputs of all blocks, before the backward from a loss begins."""
    outputs = list(outputs)
    unused = [output for output in outputs if not output.note_living()]
    if unused:
        readers = _readers(loss)
        for output in unused:
            output.note_readers(readers)
    for output in outputs:
        output.forget_graph()


def _readers(loss: Tensor) -> _Readers:
    found: _Readers = {}
    stack, seen = [grad_fn_of(loss)], set[Any]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number = sequence_number(node)
        for key in node.next_functions:
            found[key] = max(found.get(key, -1), number)
            stack.append(key[0])
    return found


def used_by_all(uses: Sequence[tuple[OutputUse, ...]]) -> tuple[OutputUse, ...]:
    """The uses of the output that any of several calls that are alike has.

    Empty if that is not known, as where their outputs have other numbers of tensors.

    >>> used_by_all([(OutputUse(False, False),), (OutputUse(True, False),)])
    (OutputUse(lives=True, has_gradient=False),)
    """
    if len({len(each) for each in uses}) != 1:
        return ()
    return tuple(
        OutputUse(any(each.lives for each in one), any(each.has_gradient for each in one))
        for one in zip(*uses, strict=True)
    )


def _weak(storage: UntypedStorage) -> _WeakStorage:
    return _WeakStorage(weakref.ref(storage), storage_key(storage), storage.nbytes())


def _is_alive(weak: _WeakStorage) -> bool:
    return weak.storage() is not None
