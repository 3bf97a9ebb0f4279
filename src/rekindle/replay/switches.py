"""The switches that act on every region: early stop, debug; and the flag a region can read.

Torch has switches of the same names, process-wide values of its module, and its own engine runs
the regions inside compiled code. So setting one of ours sets torch's too: no two can disagree.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rekindle.compiled.handover import torch_debug_enabled, torch_early_stop

early_stop: ContextVar[bool | None] = ContextVar("rekindle_early_stop", default=None)
debug: ContextVar[bool | None] = ContextVar("rekindle_debug", default=None)
recomputing: ContextVar[bool] = ContextVar("rekindle_recomputing", default=False)


@contextmanager
def set_checkpoint_early_stop(enable: bool) -> Iterator[None]:
    """Force early stop on or off for the regions run inside, over their own `early_stop`.

    >>> import torch, rekindle
    >>> x = torch.ones(2, requires_grad=True)
    >>> with rekindle.set_checkpoint_early_stop(False):
    ...     y = rekindle.checkpoint(torch.exp, x)
    """
    token = early_stop.set(enable)
    try:
        with torch_early_stop(enable):
            yield
    finally:
        early_stop.reset(token)


@contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Force debug on or off for the regions run inside; None leaves it to their own `debug`.

    >>> import torch, rekindle
    >>> x = torch.ones(2, requires_grad=True)
    >>> with rekindle.set_checkpoint_debug_enabled(True):
    ...     y = rekindle.checkpoint(torch.exp, x)
    """
    token = debug.set(enabled)
    try:
        with torch_debug_enabled(enabled):
            yield
    finally:
        debug.reset(token)


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
    return recomputing.get()
