"""Several calls into C as one.

Note [In one call]. Python runs signal handlers, and so raises `KeyboardInterrupt`, when a Python
function begins, after any call, and when a loop jumps back; not inside a function of C. So a change
that must happen wholly or not at all is made by one call into C: `tuple(map(function, values))`.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any


def call_each(functions: Iterable[Callable[[], Any]]) -> tuple[Any, ...]:
    """Call functions of C without arguments: Note [In one call].

    No private name of torch, tried on torch 2.11 and 2.13; goes when its callers here do.
    """
    return tuple(map(operator.call, functions))
