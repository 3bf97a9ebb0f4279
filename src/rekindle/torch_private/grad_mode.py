"""Grad mode and inference mode, set by one call into C: Note [In one call]."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
_NO_CHANGE = nullcontext()

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Turns gradients on or off on this thread.

Tried on torch 2.11 and 2.13. The public form, `torch.set_grad_enabled`, is a Python object that an
interrupt may leave half made. Goes when there is a public function in C."""

grad_enabled: Callable[[], bool] = torch.is_grad_enabled
"""True if gradients are on.

Public, and bound here for hot paths; tried on torch 2.11 and 2.13. Goes when `set_grad_enabled`
does."""


def without_grad(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function with gradients off.

    Tried on torch 2.11 and 2.13. The public form, `torch.no_grad()`, may be undone by Ctrl-C. Goes
    when `set_grad_enabled` does.
    """
    was = grad_enabled()
    try:
        set_grad_enabled(False)
        return function(*args)
    finally:
        set_grad_enabled(was)  # the first call of all: nothing can strike before it


def outside_inference_mode() -> AbstractContextManager[Any]:
    """A context that leaves inference mode when it is made, and enters it again at its end.

    Tried on torch 2.11 and 2.13. The public form is `torch.inference_mode(False)`, which costs more
    where inference mode is off. Goes when it does not.
    """
    if not torch.is_inference_mode_enabled():
        return _NO_CHANGE
    guard: AbstractContextManager[Any] = torch._C._InferenceMode(False)
    return guard


def below_autograd() -> AbstractContextManager[Any]:
    """A context in which ops run as below autograd, whatever the grad mode is.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    guard: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard
