"""One thread at a time measures a model: while it does, the model does not run as it should."""

from _thread import RLock
from threading import Lock
from weakref import WeakKeyDictionary

from torch import nn

_locks: "WeakKeyDictionary[nn.Module, RLock]" = WeakKeyDictionary()
_adding = Lock()


def turn_of(model: nn.Module) -> "RLock":
    """The lock that whoever measures a model holds, and whoever plans it again."""
    with _adding:
        return _locks.setdefault(model, RLock())
