"""`RowTensor`: a tensor that is computed a few rows at a time, where somebody asks for its rows."""

from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import Function

from rekindle.rows.chunks import evaluate
from rekindle.rows.expressions import Leaf, Node
from rekindle.rows.row_ops import VIEWS, lazily, reduced
from rekindle.torch_private.dispatch_modes import past_modes
from rekindle.torch_private.op_types import writes
from rekindle.torch_private.pytrees import tree_leaves, tree_map
from rekindle.torch_private.tensor_identity import without_memory
from rekindle.torch_private.torch_function import subclass_functions_disabled


class RowTensor(Tensor):
    """A tensor whose values are an expression of the rows of others.

    Note [Who reads logits]. What a row tensor is computed from may be written to: by an op in
    place, or by the gradient of logits, which takes their memory. So each leaf knows the row
    tensors that depend on it and are alive, wherever they are held: by a user, or by autograd,
    which saves some. Before an op writes to one, the others are computed. The gradient is written
    over logits only if nobody is left who could read them: no row tensor, and no tensor that shares
    their memory.
    """

    node: Node

    @staticmethod
    def __new__(cls, node: Node) -> Self:
        meta = node.meta
        (leaf, *_) = node.leaves
        made: Self = without_memory(cls, meta, leaf.tensor.device)
        made.node = node
        for leaf in node.leaves:
            leaf.add_user(made)
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(whole(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return whole(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return whole(self).clone()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with subclass_functions_disabled():
            if func in (torch.gather, Tensor.gather):
                found = _gather_one(*args, **kwargs)
                if found is not None:
                    return found
            if func in _READS_MEMORY:
                args = (_Whole.apply(args[0]), *args[1:])  # type: ignore[no-untyped-call]
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if writes(func):
            _settle_readers((args, kwargs))
        else:
            nodes = tree_map(_node_of, (args, kwargs))
            found = reduced(func, *nodes)
            if found is not NotImplemented:
                return found
            given, options = nodes
            meta = past_modes(_as_meta, func, given, options)
            node = None if meta is None else lazily(func, given, options, meta)
            if node is not None:
                if func in VIEWS:
                    node.as_view = _View(func, *nodes)
                return cls(node)
        return func(*tree_map(whole, args), **tree_map(whole, kwargs))


_READS_MEMORY = frozenset(
    (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr)
)
"""Methods that no dispatcher sees: they read a tensor's memory."""


class _Whole(Function):
    """The identity, from a row tensor to an ordinary one."""

    @staticmethod
    def forward(_ctx: Any, tensor: RowTensor) -> Tensor:
        found: Tensor = whole(tensor).detach()
        return found

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _node_of(value: Any) -> Any:
    return value.node if isinstance(value, RowTensor) else value


class _View:
    """Makes a view of a tensor that was asked for as a whole."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs

    def __call__(self) -> Tensor:
        found: Tensor = self._func(*tree_map(_real, self._args), **self._kwargs)
        return found


def _real(value: Any) -> Any:
    """All of a node, as a tensor, which is remembered; other values stay."""
    if not isinstance(value, Node):
        return value
    if value.real is None:
        value.real = evaluate(value) if value.as_view is None else value.as_view()
    return value.real


def whole(value: Any) -> Any:
    """A row tensor's values, as an ordinary tensor without a graph; other values stay."""
    return _real(value.node) if isinstance(value, RowTensor) else value


def _settle_readers(given: Any) -> None:
    """Compute all that is computed from what an op is about to write to."""
    leaves = {
        leaf
        for value in tree_leaves(given)
        if isinstance(value, RowTensor)
        for leaf in value.node.leaves
    }
    for leaf in leaves:
        for reader in list(leaf.users.values()):
            whole(reader)


def _as_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The result of an op, as a tensor without memory; None if it is not one tensor."""

    def without_memory(value: Any) -> Any:
        if isinstance(value, Node):
            return value.meta
        if isinstance(value, Tensor):
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
        return value

    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    try:
        found = func(*tree_map(without_memory, args), **tree_map(without_memory, kwargs))
    except (NotImplementedError, RuntimeError, ValueError, IndexError, TypeError):
        return None  # the op itself will say what is wrong
    return found if isinstance(found, Tensor) else None


def _gather_one(input: Any, dim: int, index: Any, **kwargs: Any) -> Any:  # noqa: A002
    """One element of each row, as a loss of rows has it; None if that is not what is asked for.

    Autograd's gradient of `gather` is a tensor of zeros as large as the logits.
    """
    is_one = (
        isinstance(input, RowTensor)
        and not isinstance(index, RowTensor)
        and not kwargs
        and input.dim() > 1
        and dim in (-1, input.dim() - 1)
        and index.shape == (*input.shape[:-1], 1)
    )
    if not is_one:
        return None
    rows = input.view(-1, input.shape[-1])
    losses = torch.nn.functional.nll_loss(
        rows, index.reshape(-1), reduction="none", ignore_index=_NO_INDEX
    )
    return -losses.view(index.shape)


_NO_INDEX = -(2**62)


def row_tensor(tensor: Tensor) -> RowTensor:
    """A row tensor that has the values of a tensor, whose rows lie one after another."""
    meta = past_modes(
        lambda: torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )
    )
    return RowTensor(Leaf(tensor, meta))


def runs_by_rows(types: Any) -> bool:
    """True if an op is given row tensors: a mode leaves it to them, and sees what they run."""
    return RowTensor in types
