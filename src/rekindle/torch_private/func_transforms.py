"""`torch.func` transforms (grad, vmap, …) and the vmap of `is_grads_batched`."""

import operator
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch

from rekindle.torch_private.c_calls import call_each

func_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""The innermost `torch.func` transform that runs here, or None.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""


class LeftTransforms:
    """Leaves all `torch.func` transforms, and enters them again.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """

    def __init__(self) -> None:
        self._depth = torch._C._functorch.get_dynamic_layer_stack_depth()
        self._left: list[Any] = []

    def leave(self) -> None:
        pop = torch._C._functorch.pop_dynamic_layer_stack
        self._left.extend(map(operator.call, repeat(pop, self._depth)))

    def enter_again(self) -> None:
        if torch._C._functorch.get_dynamic_layer_stack_depth() < self._depth:
            tuple(map(torch._C._functorch.push_dynamic_layer_stack, reversed(self._left)))


_up, _down = torch._C._vmapmode_increment_nesting, torch._C._vmapmode_decrement_nesting
_UP_AND_DOWN = _up, _down


def old_vmap_level() -> int:
    """Depth in the vmap that `torch.autograd.grad(is_grads_batched=True)` uses.

    Tried on torch 2.11 and 2.13. Goes when `is_grads_batched` uses `torch.func`.
    """
    level: int = call_each(_UP_AND_DOWN)[1]
    return level


def set_old_vmap_level(level: int) -> None:
    """Leave that vmap, with 0, or be as deep in it as before.

    Tried on torch 2.11 and 2.13. Goes when `is_grads_batched` uses `torch.func`.
    """
    now = old_vmap_level()
    call_each(repeat(_up if now < level else _down, abs(level - now)))
