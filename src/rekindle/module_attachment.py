"""Attachments: objects such as a plan's runtime that belong to a module, with their hooks.

An attachment is in the module's own `__dict__`, so that a copy or a pickle of the module has its
own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rekindle.torch_private.module_calls import forward_hooks

_NAME = "_rekindle_attached"


class Attachment(Protocol):
    """An object that can be attached to modules."""

    is_on: bool
    """False while a model is measured: its hooks then do nothing."""

    def annotate_oom(self, error: torch.OutOfMemoryError) -> None:
        """Add a note to an error for lack of memory that one of the modules ran into."""


@dataclass(eq=False)
class _Attached:
    attachment: Attachment
    handles: list[RemovableHandle]
    """The hooks that are removed with it."""


def attach(module: nn.Module, attachment: Attachment, *handles: RemovableHandle) -> None:
    """Attach an object to a module, with hooks of its own, in the place of another one."""
    detach(module)
    vars(module)[_NAME] = _Attached(attachment, list(handles))


def attached(module: nn.Module) -> Attachment | None:
    """The object that is attached to a module; None if there is none."""
    found = vars(module).get(_NAME)
    return None if found is None else found.attachment


def detach(module: nn.Module) -> None:
    """Remove the object that is attached to a module, and its hooks."""
    found = vars(module).pop(_NAME, None)
    if found is not None:
        for handle in found.handles:
            handle.remove()


Suspended = dict[nn.Module, _Attached]


def suspend(model: nn.Module) -> Suspended:
    """Turn off all that is attached to the modules of a model; hooks stay in their places."""
    found = {m: vars(m).pop(_NAME) for m in model.modules() if _NAME in vars(m)}
    for each in found.values():
        each.attachment.is_on = False
    return found


def resume(suspended: Suspended) -> None:
    """Undo `suspend`."""
    for module, each in suspended.items():
        vars(module)[_NAME] = each
        each.attachment.is_on = True


def discard(suspended: Suspended) -> None:
    """Remove the hooks of suspended attachments, which are not resumed."""
    for each in suspended.values():
        for handle in each.handles:
            handle.remove()


Hooks = list[tuple[dict[int, Any], frozenset[int]]]


def snapshot_hooks(model: nn.Module) -> Hooks:
    """The forward hooks on a model's modules now."""
    found = [hooks for module in model.modules() for hooks in forward_hooks(module)]
    return [(hooks, frozenset(hooks)) for hooks in found]


def remove_new_hooks(hooks: Hooks) -> None:
    """Remove the hooks that were put on a model since `snapshot_hooks`."""
    for now, before in hooks:
        for key in now.keys() - before:
            del now[key]


def annotate_oom(error: torch.OutOfMemoryError, function: Callable[..., Any]) -> None:
    """Add a note to an error for lack of memory in a region, if its module has an attachment."""
    module = getattr(function, "__self__", function)
    attachment = attached(module) if isinstance(module, nn.Module) else None
    if attachment is not None:
        attachment.annotate_oom(error)
