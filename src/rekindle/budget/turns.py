"""One thread at a time measures a model: while it does, the model does not run as it should."""

from _thread import RLock
from collections.abc import Callable
from threading import Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_locks: "WeakKeyDictionary[nn.Module, RLock]" = WeakKeyDictionary()
_adding = Lock()


def turn_of(model: nn.Module) -> "RLock":
    """The lock that whoever measures a model holds, and whoever plans it again."""
    with _adding:
        return _locks.setdefault(model, RLock())


def on_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook of a module, for calls of the thread that registers it alone.

    A thread that waits for its turn to call the model may have taken the hook along, and calls it
    once it is gone from the module, with fewer arguments.
    """
    thread = get_ident()
    return lambda *args: hook(*args) if get_ident() == thread else None
