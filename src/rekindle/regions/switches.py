"""The switches that act on every region: early stop, debug; and the flag a region can read.

Torch has switches of the same names, process-wide values of its module, and its own engine runs the
regions inside compiled code. There is one of each: ours are torch's values, whoever sets them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from rekindle.compile.torch_checkpoint import torch_module

_EARLY_STOP = "_enable_checkpoint_early_stop"
_DEBUG = "_checkpoint_debug_enabled"
recomputing: ContextVar[bool] = ContextVar("rekindle_recomputing", default=False)


def early_stop() -> bool | None:
    """What early stop is forced to, or None."""
    return torch_module._enable_checkpoint_early_stop


def debug() -> bool | None:
    """What debug is forced to, or None."""
    return torch_module._checkpoint_debug_enabled


@contextmanager
def _set(name: str, value: Any) -> Iterator[None]:
    before = getattr(torch_module, name)
    try:
        setattr(torch_module, name, value)
        yield
    finally:
        setattr(torch_module, name, before)


@contextmanager
def set_checkpoint_early_stop(enable: bool) -> Iterator[None]:
    """Force early stop on or off for the regions run inside, over their own `early_stop`.

    >>> import torch, rekindle
    >>> x = torch.ones(2, requires_grad=True)
    >>> with rekindle.set_checkpoint_early_stop(False):
    ...     y = rekindle.checkpoint(torch.exp, x)
    """
    with _set(_EARLY_STOP, enable):
        yield


@contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Force debug on or off for the regions run inside; None leaves it to their own `debug`.

    >>> import torch, rekindle
    >>> x = torch.ones(2, requires_grad=True)
    >>> with rekindle.set_checkpoint_debug_enabled(True):
    ...     y = rekindle.checkpoint(torch.exp, x)
    """
    with _set(_DEBUG, enabled):
        yield


def is_recomputing() -> bool:
    """Whether this code runs in a replay: guard what must happen once a step with it.

    >>> import torch, rekindle
    >>> calls = []
    >>> def region(x):
    ...     if not rekindle.is_recomputing():
    ...         calls.append("once")
    ...     return x.exp()
    >>> rekindle.checkpoint(region, torch.ones(2, requires_grad=True)).sum().backward()
    >>> calls
    ['once']
    """
    if torch.compiler.is_compiling():  # traced once; and Dynamo cannot read a context variable
        return False
    return recomputing.get()
