"""A lock per model: one thread at a time measures it, and it runs by other strategies meanwhile."""

from _thread import RLock
from collections.abc import Callable
from threading import Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rekindle.planner.compiled_modules import COMPILED_STEP
from rekindle.torch_private.dynamo_frames import break_graph, no_graph_begins, within_compiled_code

_locks: "WeakKeyDictionary[nn.Module, RLock]" = WeakKeyDictionary()
_adding = Lock()


def planning_lock(model: nn.Module) -> "RLock":
    """Return the lock that is held while a model is measured, or planned again."""
    with _adding:
        return _locks.setdefault(model, RLock())


def for_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's hook that runs in calls of this thread alone.

    A thread that waits for the lock to call the model may have collected the hook before that, and
    calls it after its removal, with fewer arguments. In compiled code the hook raises an error.
    """
    thread = get_ident()

    @no_graph_begins
    def run(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            break_graph(COMPILED_STEP)
        if get_ident() != thread:
            return None
        if within_compiled_code():
            raise ValueError(f"The model is called in compiled code: {COMPILED_STEP}.")
        return hook(*args)

    return run
