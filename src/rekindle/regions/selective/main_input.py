"""The input of a region: of the tensors that it is given, the one that a plan may move."""

from typing import Any

from torch import Tensor

from rekindle.regions.selective.op_addresses import is_parameter
from rekindle.torch_private.pytrees import tree_leaves


def main_input(args: Any, kwargs: Any) -> Tensor | None:
    """Return the largest tensor that requires a gradient and is no parameter; None without any.

    Others, such as masks and positions, are shared by many regions, and stay for all of them.
    """
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    trained = [tensor for tensor in given if tensor.requires_grad and not is_parameter(tensor)]
    return max(trained, key=lambda tensor: tensor.numel() * tensor.itemsize, default=None)
