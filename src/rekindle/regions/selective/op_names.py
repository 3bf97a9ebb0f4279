"""Ops as users give them: an overload, all overloads at once, a name, or an `autograd.Function`."""

import inspect
from functools import cache
from types import CodeType
from typing import Any, TypeAlias

import torch

from rekindle.torch_private.op_types import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    overload_name,
    packet_name,
    schema_of,
)

OpSpec: TypeAlias = OpOverload | OpOverloadPacket | HigherOrderOperator | type


def is_op(given: Any) -> bool:
    """Returns whether something is an op, and not the name of one."""
    if isinstance(given, type):
        return issubclass(given, torch.autograd.Function)
    return isinstance(given, OpOverload | OpOverloadPacket | HigherOrderOperator)


def op_of(given: Any) -> OpSpec:
    """The op that a user means; an error says how to name one."""
    if is_op(given):
        return given  # type: ignore[no-any-return]
    if isinstance(given, str):
        return _op_named(given)
    name = getattr(given, "__name__", None)
    hint = ""
    if callable(given) and name and hasattr(torch.ops.aten, name):
        hint = f" Did you mean torch.ops.aten.{name}?"
    raise TypeError(
        "An op is like torch.ops.aten.mm, torch.ops.aten.mm.default or 'aten::mm', a higher-order "
        f"operator or an autograd.Function, but got {given!r} of type {type(given).__name__}.{hint}"
    )


def _op_named(name: str) -> OpSpec:
    namespace, _, rest = name.replace("::", ".", 1).partition(".")
    packet, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(torch.ops, namespace), packet)
        if overload:
            found = getattr(found, overload)
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, OpOverload | OpOverloadPacket | HigherOrderOperator):
        raise ValueError(f"There is no op {name!r}: names are like 'aten::mm'")
    return found


def matches(op: Any, ops: "frozenset[OpSpec]") -> bool:
    """Returns whether an op, or its packet of overloads, is in a set."""
    return op in ops or getattr(op, "overloadpacket", None) in ops


def name_of(op: OpSpec) -> Any:
    """An op by its name, as `op_of` takes it; an `autograd.Function` as it is."""
    if isinstance(op, OpOverload):
        return overload_name(op)
    if isinstance(op, OpOverloadPacket):
        return packet_name(op)
    return op if isinstance(op, type) else f"higher_order::{op.name()}"


def format_op(op: OpSpec) -> str:
    """An op as code."""
    name = name_of(op)
    return name.__name__ if isinstance(name, type) else repr(name)


def code_of(function: Any) -> CodeType:
    """The code that runs when an `autograd.Function` does."""
    code = getattr(inspect.unwrap(function.forward), "__code__", None)
    if code is None:
        raise TypeError(
            f"{function.__name__}.forward is no plain function: its ops cannot be told apart"
        )
    return code  # type: ignore[no-any-return]


_CHEAP = (
    *("sum", "mean", "var", "var_mean", "std", "amax", "amin", "norm", "linalg_vector_norm"),
    *("_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "_fused_rms_norm"),
    *("cat", "stack", "clone", "_to_copy", "copy", "native_dropout", "embedding", "index_select"),
    *("index", "gather", "slice_scatter", "select_scatter", "repeat", "roll", "flip", "tril"),
    *("triu", "constant_pad_nd", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like"),
    *("arange", "scalar_tensor", "one_hot", "cumsum", "all", "any", "_unsafe_view", "max", "min"),
)


@cache
def cheap(op: Any) -> bool:
    """Returns whether memory bandwidth bounds an op: it takes as long as reading its result."""
    if not isinstance(op, OpOverload):
        return False
    if torch.Tag.pointwise in op.tags or op.is_view:
        return True
    return op.namespace == "aten" and schema_of(op).name.partition("::")[2] in _CHEAP
