"""A tensor's own number, shape and class, apart from the Python object that stands for it."""

from collections.abc import Callable
from typing import Any

import torch

WeakTensor: Callable[[torch.Tensor], Any] = torch._C._WeakTensorRef  # type: ignore[attr-defined]
"""A weak reference to a tensor itself, not to its Python object: while it is held, no other tensor
gets the same `tensor_key`.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""


def tensor_key(tensor: torch.Tensor) -> int:
    """A number that no other living tensor has, whatever Python objects stand for it.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    key: int = tensor._cdata
    return key


def generator_key(generator: torch.Generator) -> int:
    """A number that no other living generator has: ops are given a new object for it each time.

    Tried on torch 2.11 and 2.13. Goes when torch keeps one Python object for a generator.
    """
    key: int = generator._cdata  # type: ignore[attr-defined]
    return key


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """A tensor's shape; of a nested one that is not jagged, and has none, its number of elements.

    Tried on torch 2.11 and 2.13. Goes when every nested tensor has a shape.
    """
    try:
        return tensor.shape
    except RuntimeError:
        return torch.Size((tensor.numel(),))


def as_subclass_requiring_grad(kind: type, values: torch.Tensor) -> Any:
    """A tensor of a subclass over the memory of `values`, made without the subclass's own code.

    Tried on torch 2.11 and 2.13. The public form, `Tensor.as_subclass`, does not make leaves that
    require gradients. Goes when it does.
    """
    return torch.Tensor._make_subclass(kind, values, True)


def without_memory(kind: type, like: torch.Tensor, device: torch.device) -> Any:
    """A tensor of a subclass with the shape, strides and dtype of another, and with no memory.

    Tried on torch 2.11 and 2.13, whose guide to extending torch names it without a public path.
    Goes when it has one.
    """
    return torch.Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=device
    )
