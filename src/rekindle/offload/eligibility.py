"""The test of a saved tensor for whether it may be offloaded at all."""

from typing import Any

import torch
from torch import Tensor, nn


def can_offload(x: Tensor, min_bytes: int) -> bool:
    """True if a saved tensor is an activation that can be put together again from its bytes.

    Note [Whose tensor is it]. A parameter, or a view of one, is never moved; nor is any other leaf
    that requires a gradient, for whoever gets the gradient holds it. A tensor that no op of
    autograd made may be a buffer, a mask that all layers share, the batch; or what an op made
    beside its result, such as a dropout mask. Its owner is unknown: it is moved only when it turns
    out that nobody else holds it, and not before the op that saves it has returned, since it may be
    about to be filled (`rrelu`'s noise).
    """
    if type(x) is not Tensor or x.layout is not torch.strided:
        return False
    if x.dtype is torch.int64 and x.numel() == 1:  # a number, or a ticket of a compiled graph's
        return False
    if x.is_conj() or x.is_neg() or x.is_quantized or x.is_nested or x.is_inference():
        return False
    base: Any = x if x._base is None else x._base
    if isinstance(base, nn.Parameter) or (base.requires_grad and base.is_leaf):
        return False
    storage = x.untyped_storage()
    if storage.nbytes() < max(min_bytes, 1):
        return False
    return _has_memory(storage)


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """True if there is anything to copy; a tensor that `torch.func` wraps has no memory."""
    try:
        return storage.data_ptr() != 0
    except RuntimeError:
        return False
