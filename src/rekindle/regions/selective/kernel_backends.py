"""Switches that decide which kernel computes a matrix product or a convolution."""

from typing import Any, TypeAlias

from rekindle.torch_private.kernel_switches import PRODUCT_SWITCHES

Switches: TypeAlias = tuple[Any, ...]

_GETTERS = [get for get, _ in PRODUCT_SWITCHES]


def snapshot() -> Switches:
    """The switches as they are now."""
    return tuple([get() for get in _GETTERS])


def restore(then: Switches) -> None:
    """Set the switches to what `snapshot` returned."""
    for (_, change), now, wanted in zip(PRODUCT_SWITCHES, snapshot(), then, strict=True):
        if now != wanted:
            change(wanted)
