"""The classes of ops (`torch.ops.…`), which policies take as values, and their schemas."""

from collections.abc import Callable
from typing import Any

from torch import _ops

OpOverload = _ops.OpOverload
"""The class of `torch.ops.aten.mm.default`.

Tried on torch 2.11 and 2.13. Goes when it has a public path."""

OpOverloadPacket = _ops.OpOverloadPacket
"""The class of `torch.ops.aten.mm`: all overloads together.

Tried on torch 2.11 and 2.13. Goes when it has a public path."""

HigherOrderOperator = _ops.HigherOrderOperator
"""The class of ops that take functions, such as flex attention.

Tried on torch 2.11 and 2.13. Goes when it has a public path."""


def schema_of(op: Any) -> Any:
    """The schema of an op, or None: a higher-order operator has none.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return getattr(op, "_schema", None)


def writes(op: Any) -> bool:
    """True if an op writes to any of its arguments.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return bool(op._schema.is_mutable)


def call_of(op: Any) -> Callable[..., Any]:
    """Returns a function that calls an op: of an overload, the C one that its `__call__` calls.

    Tried on torch 2.11 and 2.13. Goes when overloads are called without Python of torch's own.
    """
    return op._op if type(op) is OpOverload else op


def overload_name(op: OpOverload) -> str:
    """The name of an overload by which it is found again, as in `aten::add.Tensor`.

    Tried on torch 2.11 and 2.13. `op.name()` leaves out `default`. Goes when it does not.
    """
    return f"{op._schema.name}.{op._overloadname}"


def packet_name(packet: OpOverloadPacket) -> str:
    """The name of all overloads of an op together, as in `aten::add`.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return str(packet._qualified_op_name)


def packet_short_name(op: Any) -> str:
    """The name of an op without namespace and overload, as in `add`; empty for what is no op.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return getattr(op, "_opname", "")
