"""The switches that act on every region: early stop, debug; and the flag a region can read.

Torch has switches of the same names, process-wide values of its module, and its own engine runs the
regions inside compiled code. There is one of each: ours are torch's values, whoever sets them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rekindle.regions.base import is_replaying
from rekindle.torch_private.torch_checkpoint import (
    force_debug,
    force_early_stop,
    forced_debug,
    forced_early_stop,
)

early_stop = forced_early_stop
debug = forced_debug


@contextmanager
def _forced(get: Callable[[], Any], force: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    try:
        force(value)
        yield
    finally:
        force(before)


@contextmanager
def set_checkpoint_early_stop(enable: bool) -> Iterator[None]:
    """Force early stop on or off for the regions run inside, over their own `early_stop`.

    >>> import torch, rekindle
    >>> x = torch.ones(2, requires_grad=True)
    >>> with rekindle.set_checkpoint_early_stop(False):
    ...     y = rekindle.checkpoint(torch.exp, x)
    """
    with _forced(forced_early_stop, force_early_stop, enable):
        yield


@contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Force debug on or off for the regions run inside; None leaves it to their own `debug`.

    >>> import torch, rekindle
    >>> x = torch.ones(2, requires_grad=True)
    >>> with rekindle.set_checkpoint_debug_enabled(True):
    ...     y = rekindle.checkpoint(torch.exp, x)
    """
    with _forced(forced_debug, force_debug, enabled):
        yield


def is_recomputing() -> bool:
    """True if this code runs in a replay: guard with it what must happen once a step.

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
    return is_replaying()
