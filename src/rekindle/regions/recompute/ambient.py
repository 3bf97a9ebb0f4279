"""The state around a region that decides which ops run: taken in forward, entered again in replay.

Autocast of every device type, the default device (`with torch.device(...)`), the default dtype,
which attention kernels are allowed (`sdpa_kernel`), and the names of functions that run. Most
regions run with nothing of it changed, and then taking it is a handful of calls and one tuple.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeAlias

import torch

from rekindle.torch_private.internals import (
    TORCH_FUNCTION_ON,
    any_autocast,
    autocast_level,
    below_modes,
    cuda_in_use,
    function_modes,
    set_autocast_level,
    set_torch_function_state,
    torch_function_disabled,
    torch_function_on,
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
set_priority = torch._C._set_sdp_priority_order
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
        casts() if any_autocast() else None,
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
    with below_modes(), torch_function_disabled():
        try:
            for allow in _allow:
                allow(True)
            q = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(q, q, q)
        finally:
            tuple(map(operator.call, _allow, allowed))


def has_autocast(then: Ambient) -> bool:
    """Whether autocast was on for any device type."""
    return then[-2] is not None


def casts() -> tuple[tuple[str, bool, torch.dtype, bool], ...]:
    """Device type, on or off, dtype, and whether casts are cached; for every type there is."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    cache = torch.is_autocast_cache_enabled()
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache)
        for kind in kinds
    )


def enter(then: Ambient) -> None:
    """Have everything as in `then`; a `Surroundings` taken before puts back what is now."""
    dtype, *attention, torch_function, named, priority, casts, device = then
    (dtype_now, *attention_now, torch_function_now, _, priority_now, casts_now, device_now) = take()
    names.set(named)
    if dtype_now != dtype:
        torch.set_default_dtype(dtype)
    allow_attention(attention, attention_now)
    if torch_function and not torch_function_now:
        set_torch_function_state(TORCH_FUNCTION_ON)
    if priority is not None and priority_now != priority:
        set_priority(list(priority))
    if device_now != device:
        (device or torch.device("cpu")).__enter__()
    casts = casts or tuple(_all_off(casts_now or ()))
    if casts:
        set_autocast_level(autocast_level() + 1)
        set_casts(casts)


def allow_attention(wanted: Sequence[bool], now: Sequence[bool]) -> None:
    """Allow these of the four kinds of attention kernels, and no others."""
    for allow, before, after in zip(_allow, wanted, now, strict=True):
        if before != after:
            allow(before)


def set_casts(casts: Iterable[tuple[str, bool, torch.dtype, bool]]) -> None:
    """Have autocast as `casts` told."""
    for kind, enabled, dtype, is_cached in casts:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(is_cached)


def _all_off(casts: tuple[tuple[str, bool, torch.dtype, bool], ...]) -> Iterator[tuple[Any, ...]]:
    return ((kind, False, dtype, cache) for kind, _, dtype, cache in casts)
