"""Shapes of the tensors that a model is called with, to tell larger calls from smaller ones."""

import math
from typing import Any

from torch import Tensor

from rekindle.torch_private.pytrees import tree_leaves

Shapes = tuple[tuple[int, ...], ...]


def input_shapes(args: Any, kwargs: Any) -> Shapes:
    """Return the shapes of the tensors among the arguments, without those of single numbers."""
    leaves = tree_leaves((args, kwargs))
    return tuple(tuple(t.shape) for t in leaves if isinstance(t, Tensor) and t.dim())


def count_elements(shapes: Shapes) -> int:
    """Return the number of elements of all tensors: activations grow with it.

    >>> count_elements(((4, 128), (4,)))
    516
    """
    return sum(map(math.prod, shapes))


def format_shapes(shapes: Shapes) -> str:
    """Return shapes as text.

    >>> format_shapes(((4, 128), (4,)))
    '[4, 128], [4]'
    """
    return ", ".join(str(list(shape)) for shape in shapes)
