"""Expressions that are evaluated a few rows at a time.

A node stands for a tensor of shape `(*lead, width)`. Its rows are counted through the leading
dimensions, in their order. `rows(i, j)` computes some of them, as a tensor of shape `(j - i,
width)`, and nothing else.

A node's `meta` is a tensor without memory that has its shape, strides and dtype: those that the
tensor would have, had it been computed.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from rekindle.rows.alignment import aligned

Memo = dict[tuple[int, int, int], Tensor]
"""Rows that were computed for one chunk, by node and range: a node may be asked for twice."""
Range = tuple[int, int]


class Node:
    """An expression. Each class says how it computes rows from those of the nodes that it has."""

    def __init__(self, meta: Tensor, children: Sequence["Node"]) -> None:
        self.meta = meta
        self.children = tuple(children)
        self._leaves: frozenset[Leaf] = frozenset().union(*(child.leaves for child in children))
        self.real: Tensor | None = None
        """All of it, once somebody has asked for all."""
        self.as_view: Callable[[], Tensor] | None = None
        """Returns it as a view of the tensor that it is a view of; None if it is none."""

    @property
    def leaves(self) -> "frozenset[Leaf]":
        """The tensors that it is computed from."""
        return self._leaves

    @property
    def count(self) -> int:
        """The number of rows."""
        return prod(self.meta.shape[:-1])

    @property
    def width(self) -> int:
        return self.meta.shape[-1]

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading dimensions."""
        return tuple(self.meta.shape[:-1])

    @property
    def owner(self) -> "Node":
        """The node whose memory it would share, had it been computed: itself, if it is no view."""
        return self if self.as_view is None else self.children[0].owner

    def rows(self, start: int, stop: int, memo: Memo) -> Tensor:
        """Some rows, as a tensor of two dimensions that nobody may write to."""
        if self.real is not None:
            return _flat(self.real)[start:stop]
        key = id(self), start, stop
        found = memo.get(key)
        if found is None:
            found = memo[key] = self.compute(start, stop, memo)
        return found

    def compute(self, start: int, stop: int, memo: Memo) -> Tensor:
        """As `rows`, without looking whether they were computed before."""
        raise NotImplementedError

    def reads(self, start: int, stop: int) -> Iterator[tuple["Leaf", Range]]:
        """The rows of leaves that some rows are computed from."""
        for child in self.children:
            yield from child.reads(start, stop)


def _flat(tensor: Tensor) -> Tensor:
    """A tensor's rows, in two dimensions."""
    return tensor.reshape(-1, tensor.shape[-1])


class Leaf(Node):
    """A tensor that was computed before, whose rows lie one after another."""

    def __init__(self, tensor: Tensor, meta: Tensor) -> None:
        super().__init__(meta, ())
        self.tensor = self.real = tensor
        self.users: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """The row tensors that are computed from it, by id."""
        self.most_saved = 0
        """The most bytes that its users would have had at once, had they been computed."""

    @property
    def leaves(self) -> "frozenset[Leaf]":
        return frozenset((self,))  # made when asked for: a cycle would hold the tensor

    def add_user(self, user: Any) -> None:
        """Note a row tensor that is computed from it."""
        self.users[id(user)] = user
        owners = {
            id(node): node for each in list(self.users.values()) for node in [each.node.owner]
        }
        saved = sum(node.meta.nbytes for node in owners.values() if not isinstance(node, Leaf))
        self.most_saved = max(self.most_saved, saved)

    def reads(self, start: int, stop: int) -> Iterator[tuple["Leaf", Range]]:
        yield self, (start, stop)


class Relabeled(Node):
    """The rows of another node in the same order, with other leading dimensions: a view, a copy."""

    def __init__(self, meta: Tensor, child: Node) -> None:
        super().__init__(meta, (child,))

    def compute(self, start: int, stop: int, memo: Memo) -> Tensor:
        return self.children[0].rows(start, stop, memo)


class Runs:
    """Rows that are cut out of a leading dimension: runs of a larger tensor's rows."""

    def __init__(self, lead: Sequence[int], dim: int, start: int, stop: int) -> None:
        inner = prod(lead[dim + 1 :])
        self.length = (stop - start) * inner
        """Rows of one run."""
        self._stride = lead[dim] * inner
        self._first = start * inner

    def ranges(self, start: int, stop: int) -> Iterator[Range]:
        """The ranges of the larger tensor's rows that a range of the cut rows is."""
        while start < stop:
            run, offset = divmod(start, self.length)
            take = min(self.length - offset, stop - start)
            begin = run * self._stride + self._first + offset
            yield begin, begin + take
            start += take

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Range, Range | None]]:
        """The parts of a range of the larger tensor's rows, each with its range of the cut rows.

        None in its place if the part is not among them.
        """
        while start < stop:
            run, offset = divmod(start, self._stride)
            offset -= self._first
            if 0 <= offset < self.length:
                take = min(self.length - offset, stop - start)
                begin = run * self.length + offset
                yield (start, start + take), (begin, begin + take)
            else:
                gap = -offset if offset < 0 else self._stride - offset - self._first
                take = min(gap, stop - start)
                yield (start, start + take), None
            start += take


class Cut(Node):
    """Some of the rows of another node: a slice of a leading dimension."""

    def __init__(self, meta: Tensor, child: Node, runs: Runs) -> None:
        super().__init__(meta, (child,))
        self._runs = runs

    def compute(self, start: int, stop: int, memo: Memo) -> Tensor:
        child = self.children[0]
        found = [child.rows(*part, memo) for part in self._runs.ranges(start, stop)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def reads(self, start: int, stop: int) -> Iterator[tuple[Leaf, Range]]:
        for part in self._runs.ranges(start, stop):
            yield from self.children[0].reads(*part)


class Padded(Node):
    """The rows of another node among rows of zeros: the gradient of a slice."""

    def __init__(self, meta: Tensor, child: Node, runs: Runs, device: torch.device) -> None:
        super().__init__(meta, (child,))
        self._runs = runs
        self._device = device

    def compute(self, start: int, stop: int, memo: Memo) -> Tensor:
        found = [
            self._zeros(stop - start) if own is None else self.children[0].rows(*own, memo)
            for (start, stop), own in self._runs.pieces(start, stop)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros((count, self.width), dtype=self.meta.dtype, device=self._device)

    def reads(self, start: int, stop: int) -> Iterator[tuple[Leaf, Range]]:
        for _, own in self._runs.pieces(start, stop):
            if own is not None:
                yield from self.children[0].reads(*own)


class RowArgument:
    """An argument of an op that has one row for each of the node's, or one for all of them."""

    def rows(self, start: int, stop: int, memo: Memo) -> Any:
        """The argument for some rows."""
        raise NotImplementedError


class NodeArgument(RowArgument):
    """Rows of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def rows(self, start: int, stop: int, memo: Memo) -> Tensor:
        return self.node.rows(start, stop, memo)


class TensorArgument(RowArgument):
    """Rows of a tensor of two dimensions; of one dimension, its elements."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def rows(self, start: int, stop: int, _memo: Memo) -> Tensor:
        return self._tensor[start:stop]


class EmptyArgument(RowArgument):
    """A tensor of a node's shape and dtype that is not read."""

    def __init__(self, node: Node, device: torch.device) -> None:
        self._width, self._dtype, self._device = node.width, node.meta.dtype, device

    def rows(self, start: int, stop: int, _memo: Memo) -> Tensor:
        return torch.empty((stop - start, self._width), dtype=self._dtype, device=self._device)


class RowCall(Node):
    """An op that computes each row of its result from the same row of its arguments.

    `like` is a node whose leaves it has, where it is not computed from any. An op that `sums` over
    a row is given rows with the alignment that they have among all: rows/alignment.py.
    """

    def __init__(
        self,
        meta: Tensor,
        function: Callable[..., Tensor],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        like: Node | None = None,
        sums: bool = False,
    ) -> None:
        super().__init__(meta, [arg.node for arg in args if isinstance(arg, NodeArgument)])
        self._sums = sums
        if like is not None:
            self._leaves |= like.leaves
        self._function, self._args, self._kwargs = function, tuple(args), kwargs or {}

    def compute(self, start: int, stop: int, memo: Memo) -> Tensor:
        given = call_arguments(self._args, start, stop, memo)
        if self._sums:
            given = [aligned(each, start) if isinstance(each, Tensor) else each for each in given]
        found = self._function(*given, **self._kwargs)
        return found if found.shape[1] == self.width else found.expand(-1, self.width)


def call_arguments(args: Sequence[Any], start: int, stop: int, memo: Memo) -> list[Any]:
    """The arguments of an op for some rows."""
    return [a.rows(start, stop, memo) if isinstance(a, RowArgument) else a for a in args]
