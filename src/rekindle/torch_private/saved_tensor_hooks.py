"""The stack of saved-tensor hooks: what autograd calls when an op saves a tensor for backward."""

from collections.abc import Callable
from typing import Any

import torch

_autograd = torch._C._autograd

push_hooks: Callable[[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], None] = (
    _autograd._push_saved_tensors_default_hooks
)
"""Makes a pair of saved-tensor hooks the top one.

Tried on torch 2.11 and 2.13. The public form, `torch.autograd.graph.saved_tensors_hooks`, is a
context manager in Python that takes four times as long. Goes when that one is as fast."""

pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
"""Undoes `push_hooks`. Tried on torch 2.11 and 2.13; goes when `push_hooks` does."""

top_hooks: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks
"""The pair of saved-tensor hooks that a tensor saved now goes through, or None; takes False.

Tried on torch 2.11 and 2.13. Goes when torch has a public way to read the stack."""


def pop_hooks_to(top: Any) -> None:
    """Pop saved-tensor hooks down to those that `top_hooks` returned before, or to a stand-in.

    Tried on torch 2.11 and 2.13. Goes when torch has a public way to set the stack.
    """
    while True:
        now = top_hooks(False)
        if now is None or _are_same_hooks(now, top):
            return
        pop_hooks()


def _are_same_hooks(now: Any, top: Any) -> bool:
    if isinstance(now[0], StandInHook):
        now = now[0].stands_for
    return None not in (now, top) and now[0] is top[0] and now[1] is top[1]


class StandInHook:
    """A hook that passes tensors on, in the place of the hooks that are on top now.

    Those are not found on the stack any more, and whoever pops to them stops here. Tried on torch
    2.11 and 2.13; goes when `top_hooks` does.
    """

    def __init__(self) -> None:
        self.stands_for = top_hooks(False)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()
