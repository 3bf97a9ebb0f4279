"""What a model is called with, as shapes: which call is larger than which."""

import math
from typing import Any

from torch import Tensor

from rekindle.torch_private.pytrees import tree_leaves

Shapes = tuple[tuple[int, ...], ...]


def input_shapes(args: Any, kwargs: Any) -> Shapes:
    """The shapes of the tensors among the arguments; single numbers do not count."""
    leaves = tree_leaves((args, kwargs))
    return tuple(tuple(t.shape) for t in leaves if isinstance(t, Tensor) and t.dim())


def elements(shapes: Shapes) -> int:
    """How many numbers there are in all: what activations grow with.

    >>> elements(((4, 128), (4,)))
    516
    """
    return sum(map(math.prod, shapes))


def told(shapes: Shapes) -> str:
    """In words.

    >>> told(((4, 128), (4,)))
    '[4, 128], [4]'
    """
    return ", ".join(str(list(shape)) for shape in shapes)
