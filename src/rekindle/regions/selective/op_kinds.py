"""Kinds of ops: whether, and how, an op can be run again."""

from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rekindle.torch_private.dispatch_modes import reads_metadata
from rekindle.torch_private.grad_mode import grad_enabled
from rekindle.torch_private.op_types import call_of, packet_short_name, schema_of
from rekindle.torch_private.torch_checkpoint import SAC_IGNORED_OPS

if TYPE_CHECKING:
    from rekindle.regions.selective.decisions import Decision


class OpKind(Enum):
    """A way to treat an op in a region that records it: Note [What is not made again]."""

    VIEW = "shows an argument in another way"
    PURE = "makes its results from its arguments, the same every time"
    RANDOM = "draws random numbers, or may"
    FILLED = "copies; something may write to the copy unseen, where autograd does not follow"
    """As in the forward of an `autograd.Function`, or under `no_grad`."""
    CHANGES = "changes arguments, as its schema says"
    UNWRITTEN = "leaves its result unwritten"
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
    """Returns whether torch's switches of backends decide which kernel computes an op."""
    return packet_short_name(func) in _PRODUCTS


def depends_on_grad_mode(func: Any) -> bool:
    """Returns whether an op may do something else where gradients are off."""
    return getattr(func, "namespace", "") not in _OWN or "rnn" in func.name()


def kind_of(func: Any) -> OpKind:
    """The kind of an op."""
    schema = schema_of(func)
    if schema is None:
        return OpKind.PURE if func.name() in _PURE_OPERATORS else OpKind.OPAQUE
    if reads_metadata(func):
        return OpKind.METADATA
    name = func.name().split("::")[-1].split(".")[0]
    if schema.is_mutable:
        return OpKind.CHANGES
    if any(part in name for part in _CHANGES_BUFFERS):
        return OpKind.OPAQUE
    if name in _UNWRITTEN:
        return OpKind.UNWRITTEN
    if torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in _OWN:
        return OpKind.RANDOM
    if func.is_view or name in _VIEWS:
        return OpKind.VIEW
    return OpKind.FILLED if name in _FILLED else OpKind.PURE


def can_be_run_again(kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Returns whether a call of an op of this kind can be repeated."""
    if kind is OpKind.PURE or kind is OpKind.VIEW:
        return True
    if kind is OpKind.RANDOM:  # but not with a generator of its own, which goes on
        return not (kwargs and kwargs.get("generator") is not None)
    if kind is OpKind.FILLED:  # where autograd follows, nobody writes behind its back
        return grad_enabled() and isinstance(args[0], Tensor) and args[0].requires_grad
    return False


def leading_tensors(func: Any) -> int:
    """The number of tensors that an op's arguments begin with; 0 if others may follow."""
    schema = schema_of(func)
    if schema is None:
        return 0
    are_tensors = [str(argument.type) == "Tensor" for argument in schema.arguments]
    count = [*are_tensors, False].index(False)
    rest = schema.arguments[count:]
    if any("Tensor" in str(argument.type) or str(argument.type) == "Any" for argument in rest):
        return 0
    return 0 if any(argument.kwarg_only for argument in schema.arguments[:count]) else count


class OpTraits:
    """Properties of an op under a policy, found out once."""

    __slots__ = (
        *("call", "decision", "depends_on_backends", "depends_on_grad_mode", "func", "is_ignored"),
        *("has_settings", "is_pure", "is_view", "kind", "leading", "name"),
    )

    def __init__(self, func: Any) -> None:
        self.func = func  # so that its id, by which this is found, stays its own
        self.call = call_of(func)
        self.kind = kind_of(func)
        self.is_view = self.kind is OpKind.VIEW
        self.is_pure = self.is_view or self.kind is OpKind.PURE
        """True if the op can be run again whatever its arguments are, and draws no numbers."""
        self.leading = leading_tensors(func)
        self.name = func.name() if hasattr(func, "name") else str(func)
        self.is_ignored = func in SAC_IGNORED_OPS
        """True if policies are not asked about the op, as in torch."""
        self.depends_on_backends = depends_on_backends(func)
        self.depends_on_grad_mode = depends_on_grad_mode(func)
        self.has_settings = self.depends_on_backends or self.depends_on_grad_mode
        self.decision: Decision | None = None
        """The policy's decision, if it is the same every time and the op's inputs are not kept."""
