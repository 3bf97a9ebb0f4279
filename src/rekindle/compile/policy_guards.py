"""Guards on the policy of a region in compiled code.

Note [What a policy is guarded by]. Dynamo runs a graph again where its guards hold, and a policy is
part of the graph. Of a `context_fn` that is a function, Dynamo itself guards on the code alone: one
graph would serve every function with that code, whatever the functions have closed over. So what a
`context_fn` is made of is guarded here as well: code, closures, default arguments, and policies,
constants, ops and collections of them by value, so that blocks with equal policies share a graph;
any other object by its identity. Values that a function finds as globals are not guarded.
"""

import enum
from functools import partial
from types import FunctionType
from typing import Any
from weakref import ref

import torch

from rekindle.torch_private.dynamo_guards import (
    attribute_at,
    closure_at,
    entry_at,
    functions_in,
    install_guard,
    item_at,
)
from rekindle.torch_private.op_types import HigherOrderOperator, OpOverload, OpOverloadPacket

_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.layout, torch.Size),
)
_SINGLETONS = (enum.Enum, type, HigherOrderOperator)
_OPS = (OpOverload, OpOverloadPacket)


def guard_on_context_fn(comptime: Any) -> None:
    """Guard on the parts of the local variable `context_fn` of the traced frame.

    Called by Dynamo's `comptime` while the frame is traced.
    """
    functions = functions_in(comptime, "context_fn")
    if functions is None:
        comptime.graph_break(
            "the context_fn of a region is made in compiled code: make it before, once"
        )
        return
    guards = _Guards()
    for function, source in functions:
        guards.add(function, source)


class _Guards:
    """Guards on a value and on what the value is made of: Note [What a policy is guarded by]."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, value: Any, source: Any) -> None:
        """Guard on the value that Dynamo finds at a source."""
        if isinstance(value, _CONSTANTS):
            install_guard("CONSTANT_MATCH", source)
        elif isinstance(value, (*_SINGLETONS, *_OPS)):
            install_guard("ID_MATCH", source)
        elif isinstance(value, ref) or id(value) in self._seen:  # a weak one decides nothing alone
            return
        else:
            self._seen.add(id(value))
            self._add_compound(value, source)

    def _add_compound(self, value: Any, source: Any) -> None:
        if isinstance(value, FunctionType):
            install_guard("CLOSURE_MATCH", source)
            for i, cell in enumerate(value.__closure__ or ()):
                self._add_cell(cell, closure_at(source, i))
            self.add(value.__defaults__, attribute_at(source, "__defaults__"))
            self._add_keywords(value.__kwdefaults__, attribute_at(source, "__kwdefaults__"))
        elif isinstance(value, partial):
            install_guard("TYPE_MATCH", source)
            self.add(value.func, attribute_at(source, "func"))
            self.add(value.args, attribute_at(source, "args"))
            self._add_keywords(value.keywords, attribute_at(source, "keywords"))
        elif isinstance(getattr(value, "for_compiler", None), FunctionType):  # a policy
            self.add(value.for_compiler, attribute_at(source, "for_compiler"))
        elif type(value) in (list, tuple, set, frozenset) and all(map(_is_atom, value)):
            install_guard("EQUALS_MATCH", source)
        elif type(value) in (list, tuple):
            install_guard("SEQUENCE_LENGTH", source)
            for i, item in enumerate(value):
                self.add(item, item_at(source, i))
        else:
            install_guard("ID_MATCH", source)

    def _add_cell(self, cell: Any, source: Any) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # nothing has been assigned to the variable
            return
        self.add(value, source)

    def _add_keywords(self, keywords: dict[str, Any] | None, source: Any) -> None:
        if not keywords:
            install_guard("CONSTANT_MATCH" if keywords is None else "DICT_KEYS_MATCH", source)
            return
        install_guard("DICT_KEYS_MATCH", source)
        for name, value in keywords.items():
            self.add(value, entry_at(source, name))


def _is_atom(value: Any) -> bool:
    """True if a value can be compared in one guard with the collection that it is in."""
    return isinstance(value, (*_CONSTANTS, *_OPS))
