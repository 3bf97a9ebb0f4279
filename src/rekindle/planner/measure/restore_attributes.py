"""Restores attributes that modules change while they run: counts, metrics, lists of losses."""

import collections
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (list, dict, set, collections.deque)


@contextmanager
def restore_attributes(model: nn.Module) -> Iterator[None]:
    """Restore, at the end, attributes of modules that are numbers, tensors, or lists of such.

    Nothing else is restored: a flag may say that something was done that is not undone here, such
    as a hook that was registered. Modules of torch have no attributes to restore but such flags.
    """
    saved = [
        (vars(module), {k: (v, _copied(v)) for k, v in vars(module).items() if _is_restored(v)})
        for module in model.modules()
        if not type(module).__module__.startswith("torch.")
    ]
    try:
        yield
    finally:
        for attributes, before in saved:
            for name, (value, content) in before.items():
                if _is_restored(attributes.get(name)):
                    attributes[name] = value
                    _restore(value, content)


def _is_restored(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, _CONTAINERS) else _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    return type(value) in (int, float, complex, str)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


def _restore(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            if not torch.equal(value, content):
                value.copy_(content)
    elif isinstance(value, _CONTAINERS):
        value.clear()
        (value.extend if hasattr(value, "extend") else value.update)(content)
