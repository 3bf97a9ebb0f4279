"""Switches that decide which kernel computes a matrix product or a convolution."""

from typing import Any, TypeAlias

from rekindle.torch_private.kernel_switches import PRODUCT_SWITCHES

Switches: TypeAlias = tuple[Any, ...]

_GETTERS = [get for get, _ in PRODUCT_SWITCHES]


def take() -> Switches:
    """The switches now."""
    return tuple([get() for get in _GETTERS])


def put(then: Switches) -> None:
    """Set the switches to what they were then."""
    for (_, change), now, wanted in zip(PRODUCT_SWITCHES, take(), then, strict=True):
        if now != wanted:
            change(wanted)
