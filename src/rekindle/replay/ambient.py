"""The state around a region that decides which ops run: taken in forward, entered again in replay.

Autocast of every device type, the default device (`with torch.device(...)`), the default dtype,
which attention kernels are allowed (`sdpa_kernel`), and the names of functions that run. Most
regions run with nothing of it changed, and then taking it is a handful of calls and one tuple.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeAlias

import torch

from rekindle.internals import (
    any_autocast,
    cuda_in_use,
    function_modes,
    torch_function_disabled,
    torch_function_enabled,
    torch_function_on,
    without_modes,
)

names: ContextVar[tuple[str, ...]] = ContextVar("names", default=())
"""Of the functions with a name (`rekindle.name`) that run now, the innermost last."""

Ambient: TypeAlias = tuple[Any, ...]
"""Default dtype, the four kinds of attention, whether `__torch_function__` is on, names, the order
in which attention kernels are tried, casts and default device; equal when a region would run alike.
The last three are None when there are none."""

_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_flash, _mem_efficient, _math, _cudnn = (
    getattr(torch._C, f"_get_{name}_sdp_enabled") for name in _ATTENTION
)
_priority = torch._C._get_sdp_priority_order
_set_priority = torch._C._set_sdp_priority_order
_allow = tuple(getattr(torch._C, f"_set_sdp_use_{name}") for name in _ATTENTION)
_default_dtype = torch.get_default_dtype


def take() -> Ambient:
    """The surrounding state now."""
    return (
        _default_dtype(),
        _flash(),
        _mem_efficient(),
        _math(),
        _cudnn(),
        torch_function_on(),
        names.get(),
        _order() if cuda_in_use() else None,
        _casts() if any_autocast() else None,
        torch.get_default_device() if function_modes() else None,
    )


def _order() -> tuple[int, ...]:
    """In which order attention kernels are tried."""
    _settle_order()
    return tuple(_priority())


@cache
def _settle_order() -> None:
    """Have torch find its own order, which else it does at the first attention of the process.

    That may be the one in the region: its replay would go by the order from before.
    """
    allowed = _flash(), _mem_efficient(), _math(), _cudnn()
    with without_modes(), torch_function_disabled():
        try:
            for allow in _allow:
                allow(True)
            q = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(q, q, q)
        finally:
            for allow, before in zip(_allow, allowed, strict=True):
                allow(before)


def has_autocast(then: Ambient) -> bool:
    """Whether autocast was on for any device type."""
    return then[-2] is not None


def _casts() -> tuple[tuple[str, bool, torch.dtype, bool], ...]:
    """Device type, on or off, dtype, and whether casts are cached; for every type there is."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    cache = torch.is_autocast_cache_enabled()
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache)
        for kind in kinds
    )


@contextmanager
def entered(then: Ambient) -> Iterator[None]:
    """Run as in `then`, and put back what is now, whatever happens."""
    dtype, *attention, torch_function, named, priority, casts, device = then
    (dtype_now, *attention_now, torch_function_now, _, priority_now, casts_now, device_now) = take()
    with ExitStack() as stack:
        stack.callback(names.reset, names.set(named))
        if dtype_now != dtype:
            torch.set_default_dtype(dtype)
            stack.callback(torch.set_default_dtype, dtype_now)
        for allow, before, after in zip(_allow, attention, attention_now, strict=True):
            if before != after:
                allow(before)
                stack.callback(allow, after)
        if torch_function and not torch_function_now:
            stack.enter_context(torch_function_enabled())
        if priority is not None and priority_now != priority:
            _set_priority(list(priority))
            stack.callback(_set_priority, list(priority_now))
        if device_now != device:
            stack.enter_context(device or torch.device("cpu"))
        for kind, enabled, cast_dtype, cache in casts or _all_off(casts_now or ()):
            stack.enter_context(
                torch.autocast(kind, enabled=enabled, dtype=cast_dtype, cache_enabled=cache)
            )
        yield


def _all_off(casts: tuple[tuple[str, bool, torch.dtype, bool], ...]) -> Iterator[tuple[Any, ...]]:
    return ((kind, False, dtype, cache) for kind, _, dtype, cache in casts)
