"""Switches that decide which kernel computes a matrix product or a convolution."""

from typing import Any, TypeAlias

import torch

Switches: TypeAlias = tuple[Any, ...]

_NAMES = (
    *("mkldnn_enabled", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic"),
    *("cublas_allow_tf32", "cudnn_allow_tf32"),
)
_PAIRS = [
    (getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}"))
    for name in _NAMES
    if hasattr(torch._C, f"_get_{name}") and hasattr(torch._C, f"_set_{name}")
]
_GETTERS = [get for get, _ in _PAIRS]


def take() -> Switches:
    """The switches now."""
    return tuple([get() for get in _GETTERS])


def put(then: Switches) -> None:
    """Set the switches to what they were then."""
    for (_, change), now, wanted in zip(_PAIRS, take(), then, strict=True):
        if now != wanted:
            change(wanted)
