"""Sets of ops for policies: matrix products, attention, reductions, routing."""

import torch

from rekindle.regions.selective.op_names import OpSpec

_aten = torch.ops.aten


def _known(*names: str) -> frozenset[OpSpec]:
    """The ops of these names that this version of torch has."""
    return frozenset(getattr(_aten, name) for name in names if hasattr(_aten, name))


MATMULS = _known(
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "linear", "matmul"),
    *("convolution", "_convolution", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    *("_int_mm", "mkldnn_linear", "_trilinear"),
)
"""Ops that compute: matrix products and convolutions."""

ATTENTION = _known(
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math"),
    *("_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward"),
    "scaled_dot_product_attention",
) | frozenset([torch.ops.higher_order.flex_attention])
"""Fused attention, whichever backend does it, and flex attention."""

ROUTING = _known("topk", "sort", "argsort", "argmax", "kthvalue", "multinomial", "bucketize")
"""Ops whose results decide where tokens go: near a tie, another bit would be another route."""

REDUCTIONS = _known(
    *("sum", "mean", "var", "var_mean", "std", "std_mean", "amax", "amin", "norm", "logsumexp"),
    "linalg_vector_norm",
)
"""Ops that make little of much: to keep their results takes next to nothing, and saves reading what
they were made from once more."""
