"""Autocast: whether any is on, and the depth that decides how long casts are cached."""

from collections.abc import Callable
from itertools import repeat

import torch

from rekindle.torch_private.c_calls import call_each

any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""True if autocast is on for any device type.

Tried on torch 2.11 and 2.13. The public form, `torch.is_autocast_enabled`, asks for one device type
at a time. Goes when it takes none."""

_UP_AND_DOWN = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


def autocast_level() -> int:
    """Number of autocast contexts that are entered; casts are cached while there is one.

    Tried on torch 2.11 and 2.13: the functions are undocumented. Goes when torch has a public form.
    """
    level: int = call_each(_UP_AND_DOWN)[1]
    return level


def set_autocast_level(level: int) -> None:
    """Count so many autocast contexts as entered; with none, drop the cached casts.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    now = autocast_level()
    call_each(repeat(_UP_AND_DOWN[now > level], abs(level - now)))
    if level == 0:
        torch.clear_autocast_cache()
