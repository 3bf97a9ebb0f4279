"""Casts of parameters that autocast made before a region began, and has cached.

In the first forward under autocast a region casts its weights itself, and makes the casts again in
backward. In another one, in the same autocast, it finds them in the cache. A region that held those
would hold them for as long as its activations; so it makes them again, as in the first forward.
"""

import torch
from torch import Tensor, nn

from rekindle.torch_private.version_counters import version_of

CAST = torch.ops.aten._to_copy.default


def cast_parameter(tensor: Tensor) -> nn.Parameter | None:
    """The parameter that a tensor is the cast of, as autocast makes it; else None."""
    if tensor.is_leaf or version_of(tensor) != 0:
        return None
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    source = getattr(node.next_functions[0][0], "variable", None)
    if not isinstance(source, nn.Parameter) or source.dtype == tensor.dtype:
        return None
    is_alike = source.shape == tensor.shape and source.stride() == tensor.stride()
    return source if is_alike and source.device == tensor.device else None
