"""Attributes and gradients that are put aside for a while, and put back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def gradient_set_aside(parameter: Tensor) -> Iterator[None]:
    """Inside, a parameter has no gradient of before; then it has that one, by reference.

    Public names, tried on torch 2.11 and 2.13. Goes when `sharded_gradients_set_aside` does.
    """
    before = parameter.grad
    parameter.grad = None
    try:
        yield
    finally:
        parameter.grad = before


@contextmanager
def attributes_changed(attributes: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    """Inside, the attributes that exist among `values` have those; then their own again.

    An attribute that a version of torch does not have is left out. For private attributes of DDP
    and FSDP2, tried on torch 2.11 and 2.13. Goes when they have public forms.
    """
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update({name: values[name] for name in before})
    try:
        yield
    finally:
        attributes.update(before)
