"""Evaluation of expressions, a chunk of rows at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rekindle.rows.alignment import ROWS
from rekindle.rows.expressions import Leaf, Memo, Node, Range, call_arguments

_MOST_ELEMENTS = 2**24
"""Elements of a chunk, at most: its float32 copies then take 64 MiB each, and launches of kernels
are few."""
_LEAST_ELEMENTS = 2**15
_CHUNKS = 32
"""Chunks that a tensor is cut into, if they are not too large or too small then."""


def chunks(count: int, width: int, least: int = 1) -> Iterator[Range]:
    """The ranges of rows that are evaluated together: at least so many rows, if there are.

    Note [Rows keep their alignment] and Note [No row is alone] in rows/alignment.py.
    """
    elements = min(_MOST_ELEMENTS, max(count * width // _CHUNKS, _LEAST_ELEMENTS))
    size = max(elements // max(width, 1), least, ROWS) // ROWS * ROWS
    start = 0
    while start + size < count - 1:
        yield start, start + size
        start += size
    if start < count:
        yield start, count


def evaluate(node: Node, into: Leaf | None = None) -> Tensor:
    """All rows of a node, as a tensor of its shape; written over a leaf that nobody reads again.

    Args:
        node: the expression.
        into: a leaf of the same shape and dtype. It is used only if no chunk reads rows of it that
            another one has written.
    """
    parts = list(chunks(node.count, node.width))
    out = None if into is None or not _reads_own_rows(node, into, parts) else into.tensor
    if out is None:
        (leaf, *_) = node.leaves
        out = torch.empty(node.meta.shape, dtype=node.meta.dtype, device=leaf.tensor.device)
    flat = out.view(-1, node.width)
    for start, stop in parts:
        flat[start:stop].copy_(node.rows(start, stop, {}))
    return out


def evaluate_some(node: Node, start: int, stop: int, known: Memo) -> Tensor:
    """Some rows of a node, computed from rows that are known, fewer of them at a time."""
    (leaf, *_) = node.leaves
    shape = (stop - start, node.width)
    out = torch.empty(shape, dtype=node.meta.dtype, device=leaf.tensor.device)
    for own_start, own_stop in chunks(node.count, node.width):
        begin, end = max(own_start, start), min(own_stop, stop)
        if begin < end:
            out[begin - start : end - start].copy_(node.rows(begin, end, dict(known)))
    return out


def _reads_own_rows(node: Node, leaf: Leaf, parts: Sequence[Range]) -> bool:
    return (leaf.meta.shape, leaf.meta.dtype) == (node.meta.shape, node.meta.dtype) and all(
        start <= begin and end <= stop
        for start, stop in parts
        for read, (begin, end) in node.reads(start, stop)
        if read is leaf
    )


def reduce_rows(
    function: Callable[..., Any], node: Node, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call an op that returns a number, or a few, for each row; on all rows, chunk by chunk."""
    found = []
    for start, stop in chunks(node.count, node.width):
        memo: Memo = {}
        found.append(function(*call_arguments(args, start, stop, memo), **kwargs))
    if isinstance(found[0], Tensor):
        return torch.cat(found)
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
