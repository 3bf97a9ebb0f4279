"""What there is to know of an op before it runs: whether, and how, it can be run again."""

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from rekindle.torch_private.dispatch_modes import reads_metadata
from rekindle.torch_private.grad_mode import grad_enabled
from rekindle.torch_private.op_types import packet_short_name, schema_of


class Kind(Enum):
    """How an op is treated: Note [What is not made again] in record.py."""

    VIEW = "shows an argument in another way"
    PURE = "makes its results from its arguments, the same every time"
    RANDOM = "draws random numbers, or may"
    FILLED = "copies; something may write to the copy unseen, where autograd does not follow"
    """As in the forward of an `autograd.Function`, or under `no_grad`."""
    CHANGES = "changes arguments, as its schema says"
    LOOSE = "leaves its result unwritten"
    METADATA = "tells sizes, strides or the like: Note [Questions that are no ops]"
    OPAQUE = "may change arguments, though nothing says so"


_VIEWS = ("_unsafe_view", "wait_tensor")
"""Show their argument's memory, though their schema does not say so."""
_UNWRITTEN = (
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"),
    *("empty_permuted", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full"),
)
"""Made to be written to, perhaps by something that no dispatcher sees."""
_FILLED = (*("clone", "_to_copy", "zeros_like", "ones_like", "full_like"),)
_CHANGES_BUFFERS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm")
_PURE_OPERATORS = ("flex_attention",)
"""Higher-order operators that can be run again; of others nobody knows."""
_OWN = ("aten", "prims", "_c10d_functional")
"""Namespaces whose ops say of themselves whether they draw random numbers."""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_rnn_layer", "_cudnn_rnn")


def depends_on_backends(func: Any) -> bool:
    """Whether switches of torch's decide which kernel computes it."""
    return packet_short_name(func) in _PRODUCTS


def depends_on_grad_mode(func: Any) -> bool:
    """Whether an op may do something else where gradients are off."""
    return getattr(func, "namespace", "") not in _OWN or "rnn" in func.name()


def kind_of(func: Any) -> Kind:
    """The kind of an op."""
    schema = schema_of(func)
    if schema is None:
        return Kind.PURE if func.name() in _PURE_OPERATORS else Kind.OPAQUE
    if reads_metadata(func):
        return Kind.METADATA
    name = func.name().split("::")[-1].split(".")[0]
    if schema.is_mutable:
        return Kind.CHANGES
    if any(part in name for part in _CHANGES_BUFFERS):
        return Kind.OPAQUE
    if name in _UNWRITTEN:
        return Kind.LOOSE
    if torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in _OWN:
        return Kind.RANDOM
    if func.is_view or name in _VIEWS:
        return Kind.VIEW
    return Kind.FILLED if name in _FILLED else Kind.PURE


def can_be_run_again(kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether a call of an op of this kind can be made again."""
    if kind is Kind.PURE or kind is Kind.VIEW:
        return True
    if kind is Kind.RANDOM:  # but not with a generator of its own, which goes on
        return not (kwargs and kwargs.get("generator") is not None)
    if kind is Kind.FILLED:  # where autograd follows, nobody writes behind its back
        return grad_enabled() and isinstance(args[0], Tensor) and args[0].requires_grad
    return False
