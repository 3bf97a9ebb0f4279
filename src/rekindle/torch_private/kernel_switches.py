"""Process-wide switches that decide which kernel computes an op."""

from collections.abc import Callable
from functools import cache
from operator import call
from typing import Any

import torch

from rekindle.torch_private.dispatch_modes import below_modes
from rekindle.torch_private.torch_function import torch_function_disabled

_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")

ATTENTION_ALLOWED: tuple[Callable[[], bool], ...] = tuple(
    getattr(torch._C, f"_get_{name}_sdp_enabled") for name in _ATTENTION
)
"""For each of the four kinds of attention kernels, the function that returns whether it is allowed.

Tried on torch 2.11 and 2.13. The public forms, `torch.backends.cuda.*_sdp_enabled`, are slower by a
Python call each. Goes when one call answers for all."""

ALLOW_ATTENTION: tuple[Callable[[bool], None], ...] = tuple(
    getattr(torch._C, f"_set_sdp_use_{name}") for name in _ATTENTION
)
"""For each of the four kinds of attention kernels, the function that allows or forbids it.

Tried on torch 2.11 and 2.13. Goes when `ATTENTION_ALLOWED` does."""

attention_order: Callable[[], list[int]] = torch._C._get_sdp_priority_order
"""The order in which attention kernels are tried.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""

set_attention_order: Callable[[list[int]], None] = torch._C._set_sdp_priority_order
"""Sets it. Tried on torch 2.11 and 2.13. The public form, `sdpa_kernel(set_priority=True)`, is a
context manager. Goes when torch has a function."""


@cache
def settle_attention_order() -> None:
    """Have torch find its own order, as it otherwise does at the first attention of the process.

    That may be the one in a region, whose replay would go by the order from before. Tried on torch
    2.11 and 2.13. Goes when the order is there from the start.
    """
    allowed = [is_allowed() for is_allowed in ATTENTION_ALLOWED]
    with below_modes(), torch_function_disabled():
        try:
            for allow in ALLOW_ATTENTION:
                allow(True)
            q = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(q, q, q)
        finally:
            tuple(map(call, ALLOW_ATTENTION, allowed))  # Note [In one call]


_PRODUCTS = (
    *("mkldnn_enabled", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic"),
    *("cublas_allow_tf32", "cudnn_allow_tf32"),
)

PRODUCT_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
    (getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}"))
    for name in _PRODUCTS
    if hasattr(torch._C, f"_get_{name}") and hasattr(torch._C, f"_set_{name}")
]
"""Getter and setter of each switch that decides which kernel computes a matrix product or a
convolution.

Tried on torch 2.11 and 2.13. The public forms, attributes of `torch.backends`, are properties in
Python. Goes when one call answers for all."""
