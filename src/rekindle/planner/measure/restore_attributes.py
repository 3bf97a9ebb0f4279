"""What modules note while they run, such as counts, metrics and lists of losses, is put back."""

import collections
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_BOXES = (list, dict, set, collections.deque)


@contextmanager
def notes_put_back(model: nn.Module) -> Iterator[None]:
    """Numbers, tensors and lists of such that are attributes of modules end as they were.

    Nothing else: a flag may say that something was done that is not undone here, such as a hook
    that was registered. Modules of torch note nothing but that.
    """
    noted = [
        (vars(module), {k: (v, _copied(v)) for k, v in vars(module).items() if _is_note(v)})
        for module in model.modules()
        if not type(module).__module__.startswith("torch.")
    ]
    try:
        yield
    finally:
        for attributes, before in noted:
            for name, (value, content) in before.items():
                if _is_note(attributes.get(name)):
                    attributes[name] = value
                    _put_back(value, content)


def _is_note(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, _BOXES) else _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    return type(value) in (int, float, complex, str)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, _BOXES) else value


def _put_back(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad():
            if not torch.equal(value, content):
                value.copy_(content)
    elif isinstance(value, _BOXES):
        value.clear()
        (value.extend if hasattr(value, "extend") else value.update)(content)
