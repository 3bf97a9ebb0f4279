"""What stands on a module beside its fate: who put it there, and the hooks that go with it.

It sits in the module's own `__dict__`, so that a copy or a pickle of the module has one of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rekindle.torch_private.module_calls import forward_hooks

_NAME = "_rekindle_attached"


class Attachable(Protocol):
    """Who stands on modules."""

    is_on: bool
    """Turned off while a model is measured."""

    def tell(self, error: torch.OutOfMemoryError) -> None:
        """Add to an error what it knows."""


@dataclass(eq=False)
class _Attached:
    who: Attachable
    handles: list[RemovableHandle]


def attach(module: nn.Module, who: Attachable, *handles: RemovableHandle) -> None:
    """Let somebody stand on a module, with hooks of theirs; whoever stood there is taken off."""
    detach(module)
    vars(module)[_NAME] = _Attached(who, list(handles))


def attached(module: nn.Module) -> Attachable | None:
    """Who stands on a module."""
    found = vars(module).get(_NAME)
    return None if found is None else found.who


def detach(module: nn.Module) -> None:
    """Take off whoever stands on a module, and the hooks."""
    found = vars(module).pop(_NAME, None)
    if found is not None:
        for handle in found.handles:
            handle.remove()


Aside = dict[nn.Module, _Attached]


def set_aside(model: nn.Module) -> Aside:
    """Turn off whoever stands on the modules of a model; hooks stay in their places."""
    found = {m: vars(m).pop(_NAME) for m in model.modules() if _NAME in vars(m)}
    for each in found.values():
        each.who.is_on = False
    return found


def put_back(aside: Aside) -> None:
    """Undo `set_aside`."""
    for module, each in aside.items():
        vars(module)[_NAME] = each
        each.who.is_on = True


Hooks = list[tuple[dict[int, Any], frozenset[int]]]


def hooks_on(model: nn.Module) -> Hooks:
    """The forward hooks on a model's modules now."""
    found = [hooks for module in model.modules() for hooks in forward_hooks(module)]
    return [(hooks, frozenset(hooks)) for hooks in found]


def take_off_new(hooks: Hooks) -> None:
    """Take off the hooks that were put on a model since `hooks_on`."""
    for now, before in hooks:
        for key in now.keys() - before:
            del now[key]


def discard(aside: Aside) -> None:
    """Take off for good whoever was set aside, and the hooks."""
    for each in aside.values():
        for handle in each.handles:
            handle.remove()


def annotate_oom(error: torch.OutOfMemoryError, function: Callable[..., Any]) -> None:
    """Add to an error in a region what is known of its module's plan."""
    module = getattr(function, "__self__", function)
    who = attached(module) if isinstance(module, nn.Module) else None
    if who is not None:
        who.tell(error)
