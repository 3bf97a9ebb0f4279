"""`__torch_function__`: its modes, and whether it is looked at."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device

from rekindle.torch_private.c_calls import call_each

_C: Any = torch._C

function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Number of torch-function modes that are entered (a `torch.device` context is one).

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""

entered_function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
"""The torch-function modes that are entered, the innermost last.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""


def set_function_modes(modes: Sequence[Any]) -> None:
    """Enter these torch-function modes, and no others.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    if [*map(id, entered_function_modes())] != [*map(id, modes)]:
        call_each(repeat(torch._C._pop_torch_function_stack, function_modes()))
        tuple(map(torch._C._push_on_torch_function_stack, modes))


torch_function_on: Callable[[], bool] = torch._C._is_torch_function_enabled
"""True if `__torch_function__` of tensor subclasses is looked at.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""

torch_function_state: Callable[[], Any] = _C._get_torch_function_state
"""One of three values: `__torch_function__` is on, off for subclasses, or off for modes too.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""

set_torch_function_state: Callable[[Any], None] = _C._set_torch_function_state
"""Sets it; `backward` of a subclass turns it off.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""

TORCH_FUNCTION_ON = _C._TorchFunctionState.ENABLED
"""The value for on. Tried on torch 2.11 and 2.13; goes when `set_torch_function_state` does."""


def torch_function_disabled() -> AbstractContextManager[Any]:
    """A context with `__torch_function__` off, that of modes too.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return torch._C.DisableTorchFunction()


def subclass_functions_disabled() -> AbstractContextManager[Any]:
    """A context with `__torch_function__` of subclasses off; modes are still asked.

    Tried on torch 2.11 and 2.13, whose documentation of `torch.overrides` names it without a public
    path. Goes when it has one.
    """
    return torch._C.DisableTorchFunctionSubclass()


def default_device_mode_state() -> Any:
    """The device of the `torch.device` context that is entered, as torch keeps it beside the mode.

    Tried on torch 2.11 and 2.13. Goes when setting the modes sets it too.
    """
    return _device.CURRENT_DEVICE


def set_default_device_mode_state(device: Any) -> None:
    """Set what `default_device_mode_state` returns.

    Tried on torch 2.11 and 2.13. Goes when setting the modes sets it too.
    """
    _device.CURRENT_DEVICE = device
