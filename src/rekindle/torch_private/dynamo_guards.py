"""Dynamo's guards, and their sources: how a value is found again in later calls."""

from typing import Any


def functions_in(comptime: Any, local: str) -> list[tuple[Any, Any]] | None:
    """The functions that a local variable of the traced frame is, or is a `partial` of.

    Each comes with its source. None if the value was made in the traced code. Tried on torch 2.11
    and 2.13. Goes when `comptime` gives sources by a public name.
    """
    from torch._dynamo.variables.functions import (  # noqa: PLC0415 (slow to import)
        FunctoolsPartialVariable,
        UserFunctionVariable,
        UserMethodVariable,
    )

    whole = comptime.get_local(local)._i_will_not_complain_if_bc_breaks_VariableTracker()
    found: list[tuple[Any, Any]] = []
    pending = [whole]
    while pending:
        variable = pending.pop().realize()
        if isinstance(variable, FunctoolsPartialVariable):
            pending += [variable.func, *variable.args, *variable.keywords.values()]
        elif isinstance(variable, UserFunctionVariable) and variable.source is not None:
            if not isinstance(variable, UserMethodVariable):
                found.append((variable.fn, variable.source))
        elif variable is whole:
            return None
    return found


def install_guard(kind: str, source: Any) -> None:
    """Guard on the value at a source; `kind` is the name of a guard, such as `"ID_MATCH"`.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard  # noqa: PLC0415 (slow to import)

    install_guard(source.make_guard(getattr(GuardBuilder, kind)))


def attribute_at(source: Any, name: str) -> Any:
    """The source of an attribute of the value at a source.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    from torch._dynamo.source import AttrSource  # noqa: PLC0415 (slow to import)

    return AttrSource(source, name)


def item_at(source: Any, index: int) -> Any:
    """The source of an item of the list or tuple at a source.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    from torch._dynamo.source import GetItemSource  # noqa: PLC0415 (slow to import)

    return GetItemSource(source, index)


def entry_at(source: Any, key: Any) -> Any:
    """The source of an entry of the dict at a source.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    from torch._dynamo.source import DictGetItemSource  # noqa: PLC0415 (slow to import)

    return DictGetItemSource(source, key)


def closure_at(source: Any, index: int) -> Any:
    """The source of a value that the function at a source has closed over.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    from torch._dynamo.source import ClosureSource  # noqa: PLC0415 (slow to import)

    return attribute_at(item_at(ClosureSource(source), index), "cell_contents")
