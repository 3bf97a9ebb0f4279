"""The state around a region that decides which ops run: read in forward, entered again in replay.

Autocast of every device type, the default device (`with torch.device(...)`), the default dtype,
which attention kernels are allowed (`sdpa_kernel`), and the names of functions that run. Most
regions run with nothing of it changed, and then reading it is a handful of calls and one tuple.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch

from rekindle.torch_private.autocast import any_autocast, autocast_level, set_autocast_level
from rekindle.torch_private.cuda import cuda_in_use
from rekindle.torch_private.kernel_switches import (
    ALLOW_ATTENTION,
    ATTENTION_ALLOWED,
    attention_order,
    set_attention_order,
    settle_attention_order,
)
from rekindle.torch_private.torch_function import (
    TORCH_FUNCTION_ON,
    function_modes,
    set_torch_function_state,
    torch_function_on,
)

names: ContextVar[tuple[str, ...]] = ContextVar("names", default=())
"""Of the functions with a name (`rekindle.name`) that run now, the innermost last."""

Ambient: TypeAlias = tuple[Any, ...]
"""Default dtype, the four kinds of attention, whether `__torch_function__` is on, names, the order
in which attention kernels are tried, casts and default device; equal when a region would run alike.
The last three are None when there are none."""

_flash, _mem_efficient, _math, _cudnn = ATTENTION_ALLOWED
_default_dtype = torch.get_default_dtype


def snapshot(has_cuda: bool | None = None) -> Ambient:
    """The surrounding state now; `has_cuda` is whether CUDA is in use, where that is known."""
    if has_cuda is None:
        has_cuda = cuda_in_use()
    return (
        _default_dtype(),
        _flash(),
        _mem_efficient(),
        _math(),
        _cudnn(),
        torch_function_on(),
        names.get(),
        _order() if has_cuda else None,
        casts() if any_autocast() else None,
        torch.get_default_device() if function_modes() else None,
    )


def _order() -> tuple[int, ...]:
    """The order in which attention kernels are tried."""
    settle_attention_order()
    return tuple(attention_order())


def has_autocast(then: Ambient) -> bool:
    """True if autocast was on for any device type."""
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
    """Set the surrounding state to that of a snapshot; a `TorchState` made before puts it back."""
    dtype, *attention, torch_function, named, priority, casts, device = then
    now = snapshot()
    (dtype_now, *attention_now, torch_function_now, _, priority_now, casts_now, device_now) = now
    names.set(named)
    if dtype_now != dtype:
        torch.set_default_dtype(dtype)
    allow_attention(attention, attention_now)
    if torch_function and not torch_function_now:
        set_torch_function_state(TORCH_FUNCTION_ON)
    if priority is not None and priority_now != priority:
        set_attention_order(list(priority))
    if device_now != device:
        (device or torch.device("cpu")).__enter__()
    casts = casts or tuple(_all_off(casts_now or ()))
    if casts:
        set_autocast_level(autocast_level() + 1)
        set_casts(casts)


def allow_attention(wanted: Sequence[bool], now: Sequence[bool]) -> None:
    """Allow these of the four kinds of attention kernels, and no others."""
    for allow, before, after in zip(ALLOW_ATTENTION, wanted, now, strict=True):
        if before != after:
            allow(before)


def set_casts(casts: Iterable[tuple[str, bool, torch.dtype, bool]]) -> None:
    """Set autocast to what `casts()` returned."""
    for kind, enabled, dtype, is_cached in casts:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(is_cached)


def _all_off(casts: tuple[tuple[str, bool, torch.dtype, bool], ...]) -> Iterator[tuple[Any, ...]]:
    return ((kind, False, dtype, cache) for kind, _, dtype, cache in casts)
