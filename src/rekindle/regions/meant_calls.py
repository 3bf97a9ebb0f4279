"""Calls of `checkpoint` that may mean something else than to run a function now.

Note [A function alone]. `checkpoint(function)` is torch's call of a function without arguments, and
what Python does for a bare `@checkpoint`. It is a decorator where nothing else can be meant: no
option `use_reentrant` is given, which code written for torch has, and the function cannot be called
without arguments. A function that can be is run, as torch runs it.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from torch import nn

_UNNAMED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_OF_POLICIES = ("policy", "policies", "policy_fn", "strategy")


def is_decorated(function: Any) -> bool:
    """Return whether what is given alone is a function to decorate, not to run; refuse modules.

    >>> is_decorated(lambda x: x), is_decorated(lambda x=1: x), is_decorated(lambda *args: args)
    (True, False, False)
    """
    if isinstance(function, type) and issubclass(function, nn.Module):
        raise TypeError(
            f"checkpoint() decorates a function, but got the class {function.__name__}: decorate "
            f'its forward, or run its modules as regions: rekindle.apply(model, "recompute")'
        )
    if not isinstance(function, nn.Module):
        return needs_arguments(function)
    if needs_arguments(function.forward):
        name = type(function).__name__
        raise TypeError(
            f"checkpoint() got a {name} and no arguments of its forward. To run it now: "
            f"checkpoint(module, x). To have it run as a region at every call: "
            f'rekindle.apply(module, {{"": "recompute"}}), which changes no name in the model'
        )
    return False


def needs_arguments(function: Callable[..., Any]) -> bool:
    """Return whether a function cannot be called without arguments.

    One that takes any arguments, as wrappers of `functools.wraps` do, needs those of what it wraps.
    """
    try:
        own = inspect.signature(function, follow_wrapped=False).parameters.values()
        if any(parameter.kind in _UNNAMED for parameter in own):
            own = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return any(p.default is p.empty and p.kind not in _UNNAMED for p in own)


def refuse_policy(function: Callable[..., Any]) -> None:
    """Refuse `policy=`, unless it is a parameter of the function by name.

    A function that takes any keyword, as forwards of transformers do, would take it and ignore it.
    """
    try:
        called = function.forward if isinstance(function, nn.Module) else function
        names = inspect.signature(called).parameters
    except (TypeError, ValueError):
        return
    if "policy" not in names:
        raise TypeError(
            "checkpoint() has no option policy=: a policy is given as context_fn=, such as "
            "context_fn=rekindle.policies.keep_matmuls"
        )


def note_option(
    error: TypeError,
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    options: tuple[str, ...],
) -> None:
    """Add a note to the error of a function that was given a keyword that it does not have.

    The note says which option of `checkpoint` was meant, where one is spelled alike.
    """
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if found is None or found[1] not in kwargs:
        return
    near = ["context_fn"] if found[1] in _OF_POLICIES else get_close_matches(found[1], options, 1)
    if near:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        error.add_note(
            f"{found[1]}= is no option of checkpoint(), so {name} got it. Did you mean {near[0]}=?"
        )
