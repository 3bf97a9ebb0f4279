"""One thread at a time measures a model: while it does, the model does not run as it should."""

from _thread import RLock
from collections.abc import Callable
from threading import Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rekindle.planner.compiled_modules import FIT_FIRST
from rekindle.torch_private.dynamo_frames import break_graph, no_graph_begins, within_compiled_code

_locks: "WeakKeyDictionary[nn.Module, RLock]" = WeakKeyDictionary()
_adding = Lock()


def turn_of(model: nn.Module) -> "RLock":
    """The lock that whoever measures a model holds, and whoever plans it again."""
    with _adding:
        return _locks.setdefault(model, RLock())


def on_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook of a module, for calls of the thread that registers it alone.

    A thread that waits for its turn to call the model may have taken the hook along, and calls it
    once it is gone from the module, with fewer arguments. In compiled code the hook is refused.
    """
    thread = get_ident()

    @no_graph_begins
    def run(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            break_graph(FIT_FIRST)
        if get_ident() != thread:
            return None
        if within_compiled_code():
            raise ValueError(f"The model is called in compiled code: {FIT_FIRST}.")
        return hook(*args)

    return run
