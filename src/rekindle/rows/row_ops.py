"""The ops whose results are expressions of rows, and those that reduce each row.

An op that is not here, or is called in a way that is not known here, is run as ever, on whole
tensors.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from rekindle.rows.chunks import reduce_rows
from rekindle.rows.expressions import (
    Cut,
    EmptyArgument,
    Node,
    NodeArgument,
    Padded,
    Relabeled,
    RowCall,
    Runs,
    TensorArgument,
)
from rekindle.torch_private.op_types import schema_of, writes

aten = torch.ops.aten

ALIASES = (aten.alias.default, aten.detach.default)
_SAME_ROWS = (
    *ALIASES,
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)
VIEWS = (*_SAME_ROWS, aten.slice.Tensor, aten.select.int)
"""Ops whose results share memory with what they are given."""


class NotByRowsError(Exception):
    """An op is called in a way that does not go row by row."""


def lazily(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Tensor) -> Node | None:
    """The expression of an op's result; None if the op has none.

    Args:
        func: the op.
        args: its arguments, with nodes in the place of tensors that have one.
        kwargs: likewise.
        meta: a tensor without memory, as the op returns it.
    """
    build = _BUILDERS.get(func)
    if build is None and torch.Tag.pointwise in func.tags:
        build = _pointwise
    if build is None or not meta.dim() or writes(func) or _is_random(func):
        return None
    try:
        return build(func, args, kwargs, meta)
    except NotByRowsError:
        return None


def reduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an op that reduces rows; `NotImplemented` if it does not."""
    reduce = _REDUCTIONS.get(func)
    try:
        return NotImplemented if reduce is None else reduce(func, args, kwargs)
    except NotByRowsError:
        return NotImplemented


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _need(condition: bool) -> None:
    if not condition:
        raise NotByRowsError


def _node(value: Any) -> Node:
    _need(isinstance(value, Node))
    found: Node = value
    return found


def _device(node: Node) -> torch.device:
    (leaf, *_) = node.leaves
    return leaf.tensor.device


def _dim(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


# --- Ops whose results have the rows of what they are given --------------------------------------


def _same_rows(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], meta: Tensor) -> Node:
    node = _node(args[0])
    _need(meta.shape[-1] == node.width and prod(meta.shape[:-1]) == node.count)
    return Relabeled(meta, node)


def _clone(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], meta: Tensor) -> Node:
    return Relabeled(meta, _node(args[0]))


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Tensor) -> Node:
    _need(kwargs.get("layout") in (None, torch.strided) and not kwargs.get("pin_memory"))
    node = _node(args[0])
    device = kwargs.get("device")
    _need(device is None or torch.device(device) == _device(node))
    return RowCall(meta, func, [NodeArgument(node)], {"dtype": meta.dtype})


def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Tensor) -> Node:
    _need(not kwargs)
    given = (*args, *(None, 0, None, None, 1)[len(args) :])
    node, (dim, start, stop, step) = _node(given[0]), given[1:]
    dim = _dim(dim, node.meta.dim())
    begin, end, step = slice(start, stop, step).indices(node.meta.shape[dim])
    _need(step == 1 and end > begin)
    if dim == node.meta.dim() - 1:
        return RowCall(meta, func, [NodeArgument(node), 1, begin, end])
    return Cut(meta, node, Runs(node.lead, dim, begin, end))


def _select(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], meta: Tensor) -> Node:
    node, dim, index = args
    node = _node(node)
    dim = _dim(dim, node.meta.dim())
    _need(dim < node.meta.dim() - 1 and meta.dim() > 1)
    begin = _dim(index, node.meta.shape[dim])
    return Cut(meta, node, Runs(node.lead, dim, begin, begin + 1))


def _slice_backward(
    _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], meta: Tensor
) -> Node:
    grad, sizes, dim, start, stop, step = args
    grad, dim = _node(grad), _dim(dim, len(sizes))
    begin, end, step = slice(start, stop, step).indices(sizes[dim])
    _need(step == 1 and end > begin)
    if dim == len(sizes) - 1:
        return _WidthPadded(meta, grad, begin, end)
    return Padded(meta, grad, Runs(sizes[:-1], dim, begin, end), _device(grad))


class _WidthPadded(RowCall):
    """Rows with zeros before and after: the gradient of a slice of the last dimension."""

    def __init__(self, meta: Tensor, grad: Node, start: int, stop: int) -> None:
        def pad(rows: Tensor) -> Tensor:
            sizes = (len(rows), meta.shape[-1])
            found: Tensor = aten.slice_backward.default(rows, sizes, 1, start, stop, 1)
            return found

        super().__init__(meta, pad, [NodeArgument(grad)])


def _select_backward(_func: Any, args: tuple[Any, ...], _kw: dict[str, Any], meta: Tensor) -> Node:
    grad, sizes, dim, index = args
    grad, dim = _node(grad), _dim(dim, len(sizes))
    _need(dim < len(sizes) - 1)
    begin = _dim(index, sizes[dim])
    return Padded(meta, grad, Runs(sizes[:-1], dim, begin, begin + 1), _device(grad))


# --- Ops that compute each row from a row --------------------------------------------------------


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Tensor) -> Node:
    _need(not any(isinstance(value, Tensor | Node) for value in kwargs.values()))
    return RowCall(meta, func, [_by_rows(arg, meta) for arg in args], kwargs)


def _by_rows(value: Any, meta: Tensor) -> Any:
    """An argument that is broadcast to a result, by its rows."""
    if isinstance(value, Node):
        _need(value.lead == tuple(meta.shape[:-1]) and value.width in (1, meta.shape[-1]))
        return NodeArgument(value)
    if not isinstance(value, Tensor) or not value.dim():
        return value
    lead, width = meta.shape[:-1], value.shape[-1]
    if value.numel() == width:  # one row for all
        return value.reshape(1, width)
    narrow = value[..., :1] if value.stride(-1) == 0 else value
    whole = narrow.expand(*lead, narrow.shape[-1])
    try:
        return TensorArgument(whole.view(-1, narrow.shape[-1]))
    except RuntimeError:  # rows that do not lie one after another would be copied
        _need(narrow.shape[-1] == 1)
        return TensorArgument(whole.reshape(-1, 1))


def _softmax(func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], meta: Tensor) -> Node:
    node, dim, half_to_float = args
    node = _node(node)
    _need(_dim(dim, meta.dim()) == meta.dim() - 1)
    return RowCall(meta, func, [NodeArgument(node), 1, half_to_float], sums=True)


def _softmax_backward(func: Any, args: tuple[Any, ...], _kw: dict[str, Any], meta: Tensor) -> Node:
    grad, output, dim, dtype = args
    _need(_dim(dim, meta.dim()) == meta.dim() - 1)
    rows = [_by_rows(grad, meta), _by_rows(output, meta), 1, dtype]
    return RowCall(meta, func, rows, sums=True)


def _nll_backward(func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], meta: Tensor) -> Node:
    grad, of, target, weight, reduction, ignored, total = args
    node = _node(of)
    _need(meta.dim() == 2 and not any(isinstance(each, Node) for each in (grad, target, weight)))
    if reduction == _NONE:
        grad = TensorArgument(grad)
    shape = EmptyArgument(node, _device(node))
    rows = [grad, shape, TensorArgument(target), weight, reduction, ignored, total]
    return RowCall(meta, func, rows, like=node)


# --- Ops that reduce each row --------------------------------------------------------------------

_NONE, _MEAN, _SUM = range(3)
"""Torch's numbers of reductions."""


def _reduce_last(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op whose second argument is the dimension, or a list of it, that it reduces.

    On a GPU, the kernel of a sum splits rows by how many there are: then bits depend on that.
    """
    names = [argument.name for argument in schema_of(func).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    node = _node(given.pop("self"))
    _need(_device(node).type == "cpu" or func in _WITHOUT_SUMS)
    dim = given.pop("dim", None)
    rank = node.meta.dim()
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    _need([_dim(each, rank) for each in dims] == [rank - 1])
    keepdim = given.pop("keepdim", False)
    _need(not any(isinstance(value, Tensor | Node) for value in given.values()))
    over = 1 if isinstance(dim, int) else [1]
    found = reduce_rows(func, node, [NodeArgument(node)], {"dim": over, "keepdim": True, **given})
    lead = node.lead + ((1,) if keepdim else ())
    if isinstance(found, Tensor):
        return found.view(lead)
    return tuple(part.view(lead) for part in found)


def _nll_forward(func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """The loss of each row, reduced by the kernel that would reduce them all.

    Which rows it adds up first depends on their number, not on the number of classes. So it is
    given two classes, of which one has each row's loss.
    """
    node, target, weight, reduction, ignored = args
    node = _node(node)
    _need(node.meta.dim() == 2 and (weight is None or reduction == _NONE))
    rows = [NodeArgument(node), TensorArgument(target), weight, _NONE, ignored]
    losses, _ = reduce_rows(_with_total, node, [func, *rows], {})
    if reduction == _NONE:
        return losses, losses.new_zeros(())
    classes = (-losses).unsqueeze(1).expand(-1, 2).contiguous()
    chosen = int(ignored == 0)
    row_of_class = torch.where(target == ignored, ignored, chosen)
    return func(classes, row_of_class, None, reduction, ignored)


def _with_total(func: Any, *args: Any) -> tuple[Tensor, Tensor]:
    losses, total = func(*args)
    return losses, total.view(-1)


_WITHOUT_SUMS = (
    aten.amax.default,
    aten.amin.default,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
)
"""Reductions whose bits do not depend on the order."""

_BUILDERS: dict[Any, Callable[..., Node]] = {
    **dict.fromkeys(_SAME_ROWS, _same_rows),
    aten.clone.default: _clone,
    aten._to_copy.default: _cast,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten._log_softmax.default: _softmax,
    aten._softmax.default: _softmax,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.nll_loss_backward.default: _nll_backward,
}

_REDUCTIONS: dict[Any, Callable[..., Any]] = {
    aten.nll_loss_forward.default: _nll_forward,
    **dict.fromkeys(
        (*_WITHOUT_SUMS, aten.sum.dim_IntList, aten.mean.dim, aten.logsumexp.default), _reduce_last
    ),
}
