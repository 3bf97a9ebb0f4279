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

from rekindle.torch_private.op_types import HigherOrderOperator, OpOverload, OpOverloadPacket

_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.layout, torch.Size),
)
_SINGLETONS = (enum.Enum, type, HigherOrderOperator)
_OPS = (OpOverload, OpOverloadPacket)


def guard_on_context_fn(comptime: Any) -> None:
    """Guard on what the local variable `context_fn` of the traced frame is made of.

    Called by Dynamo's `comptime` while the frame is traced. No public form of what is done here;
    tried on torch 2.11 and 2.13.
    """
    from torch._dynamo.variables.functions import (  # noqa: PLC0415 (slow to import)
        FunctoolsPartialVariable,
        UserFunctionVariable,
        UserMethodVariable,
    )

    found = comptime.get_local("context_fn")._i_will_not_complain_if_bc_breaks_VariableTracker()
    guards = _Guards()
    pending = [found]
    while pending:
        variable = pending.pop().realize()
        if isinstance(variable, FunctoolsPartialVariable):
            pending += [variable.func, *variable.args, *variable.keywords.values()]
        elif isinstance(variable, UserFunctionVariable) and variable.source is not None:
            if not isinstance(variable, UserMethodVariable):
                guards.add(variable.fn, variable.source)
        elif variable is found:
            comptime.graph_break(
                "the context_fn of a region is made in compiled code: make it before, once"
            )


class _Guards:
    """Guards on a value and on what the value is made of: Note [What a policy is guarded by]."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, value: Any, source: Any) -> None:
        """Guard on the value that Dynamo finds at a source."""
        if isinstance(value, _CONSTANTS):
            _install("CONSTANT_MATCH", source)
        elif isinstance(value, (*_SINGLETONS, *_OPS)):
            _install("ID_MATCH", source)
        elif isinstance(value, ref) or id(value) in self._seen:  # a weak one decides nothing alone
            return
        else:
            self._seen.add(id(value))
            self._add_compound(value, source)

    def _add_compound(self, value: Any, source: Any) -> None:
        from torch._dynamo.source import AttrSource, ClosureSource, GetItemSource  # noqa: PLC0415

        if isinstance(value, FunctionType):
            _install("CLOSURE_MATCH", source)
            for i, cell in enumerate(value.__closure__ or ()):
                at = AttrSource(GetItemSource(ClosureSource(source), i), "cell_contents")
                self._add_cell(cell, at)
            self.add(value.__defaults__, AttrSource(source, "__defaults__"))
            self._add_keywords(value.__kwdefaults__, AttrSource(source, "__kwdefaults__"))
        elif isinstance(value, partial):
            _install("TYPE_MATCH", source)
            self.add(value.func, AttrSource(source, "func"))
            self.add(value.args, AttrSource(source, "args"))
            self._add_keywords(value.keywords, AttrSource(source, "keywords"))
        elif isinstance(getattr(value, "for_compiler", None), FunctionType):  # a policy
            self.add(value.for_compiler, AttrSource(source, "for_compiler"))
        elif type(value) in (list, tuple, set, frozenset) and all(map(_is_atom, value)):
            _install("EQUALS_MATCH", source)
        elif type(value) in (list, tuple):
            _install("SEQUENCE_LENGTH", source)
            for i, item in enumerate(value):
                self.add(item, GetItemSource(source, i))
        else:
            _install("ID_MATCH", source)

    def _add_cell(self, cell: Any, source: Any) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # nothing has been assigned to the variable
            return
        self.add(value, source)

    def _add_keywords(self, keywords: dict[str, Any] | None, source: Any) -> None:
        from torch._dynamo.source import DictGetItemSource  # noqa: PLC0415

        if not keywords:
            _install("CONSTANT_MATCH" if keywords is None else "DICT_KEYS_MATCH", source)
            return
        _install("DICT_KEYS_MATCH", source)
        for name, value in keywords.items():
            self.add(value, DictGetItemSource(source, name))


def _is_atom(value: Any) -> bool:
    """Whether a value can be compared in one guard with the collection that it is in."""
    return isinstance(value, (*_CONSTANTS, *_OPS))


def _install(kind: str, source: Any) -> None:
    from torch._dynamo.guards import GuardBuilder, install_guard  # noqa: PLC0415

    install_guard(source.make_guard(getattr(GuardBuilder, kind)))
