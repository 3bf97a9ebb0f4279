"""A table of devices, by their makers' figures, and estimates of op times by it.

An op takes as long as its arithmetic or as its traffic with memory, whichever is longer, and a
launch. Arithmetic is counted by the formulas of `torch.utils.flop_counter`, and by our own for
attention; ops without a formula are bounded by memory. No device reaches what its maker states:
`Efficiency` says which share of it is counted on.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from rekindle.regions.selective.op_kinds import OpKind, kind_of
from rekindle.rows.row_tensor import runs_by_rows
from rekindle.sizes import format_bytes
from rekindle.torch_private.dispatch_modes import ASKS_DEVICE, TorchDispatchMode
from rekindle.torch_private.op_types import packet_short_name, schema_of
from rekindle.torch_private.pytrees import tree_leaves

_T, _G, _GIB = 1e12, 1e9, 2**30


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's stated figures that ops reach."""

    products: float = 0.7
    attention: float = 0.45
    memory: float = 0.8
    link: float = 0.85


@dataclass(frozen=True)
class Device:
    """A device by its maker's figures: dense arithmetic, one direction of the link."""

    name: str
    half: float
    """FLOP/s of products of bfloat16 or float16."""
    tf32: float
    """FLOP/s of products of float32, where `torch.set_float32_matmul_precision` allows TF32."""
    single: float
    """FLOP/s of products of float32 otherwise."""
    memory: float
    """Bytes a second from and to its own memory."""
    link: float
    """Bytes a second to host memory; 0 if there is no link."""
    memory_bytes: int
    launch: float = 4e-6
    """Seconds of a launch: an op takes no less."""
    efficiency: Efficiency = Efficiency()

    def __repr__(self) -> str:
        memory = f"{format_bytes(self.memory_bytes)} at {self.memory / _G:.0f} GB/s"
        return f"<Device {self.name}: {self.half / _T:.0f} TFLOP/s in bfloat16, {memory}>"

    @classmethod
    def named(cls, name: str) -> "Device":
        """Return a device of the table by its name, in any spelling.

        >>> Device.named("rtx4090")
        <Device RTX 4090: 165 TFLOP/s in bfloat16, 24 GiB at 1008 GB/s>
        """
        return device_named(name)

    @staticmethod
    def known() -> tuple["Device", ...]:
        """Return the devices of the table."""
        return tuple(DEVICES.values())

    @property
    def usable_bytes(self) -> int:
        """The budget that its memory has room for: all but what torch does not give out."""
        return usable_bytes(self.memory_bytes)

    @property
    def bytes_per_second(self) -> float:
        """Bytes a second to host memory that copies reach."""
        return self.link * self.efficiency.link

    def seconds(self, flops: float, nbytes: float, dtype: torch.dtype, attends: bool) -> float:
        """Return the seconds of an op with some arithmetic in a dtype and some memory traffic."""
        share = self.efficiency.attention if attends else self.efficiency.products
        arithmetic = flops / (self._rate(dtype) * share) if flops else 0.0
        return max(arithmetic, nbytes / (self.memory * self.efficiency.memory)) + self.launch

    def _rate(self, dtype: torch.dtype) -> float:
        if dtype.itemsize <= 2:
            return self.half
        if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            return self.tf32
        return self.single


DEVICES = {
    device.name: device
    for device in (
        Device("B200", 2250 * _T, 1125 * _T, 75 * _T, 8000 * _G, 64 * _G, 180 * _GIB),
        Device("H200", 989 * _T, 494 * _T, 67 * _T, 4800 * _G, 64 * _G, 141 * _GIB),
        Device("H100", 989 * _T, 494 * _T, 67 * _T, 3350 * _G, 64 * _G, 80 * _GIB),
        Device("H100-PCIe", 756 * _T, 378 * _T, 51 * _T, 2000 * _G, 64 * _G, 80 * _GIB),
        Device("A100-80GB", 312 * _T, 156 * _T, 19.5 * _T, 2039 * _G, 32 * _G, 80 * _GIB),
        Device("A100-40GB", 312 * _T, 156 * _T, 19.5 * _T, 1555 * _G, 32 * _G, 40 * _GIB),
        Device("L40S", 362 * _T, 183 * _T, 91.6 * _T, 864 * _G, 32 * _G, 48 * _GIB),
        Device("L4", 121 * _T, 60 * _T, 30.3 * _T, 300 * _G, 32 * _G, 24 * _GIB),
        Device("A10", 125 * _T, 62.5 * _T, 31.2 * _T, 600 * _G, 32 * _G, 24 * _GIB),
        Device("V100", 125 * _T, 15.7 * _T, 15.7 * _T, 900 * _G, 16 * _G, 32 * _GIB),
        Device("T4", 65 * _T, 8.1 * _T, 8.1 * _T, 320 * _G, 16 * _G, 16 * _GIB),
        Device("RTX 5090", 209 * _T, 105 * _T, 105 * _T, 1792 * _G, 64 * _G, 32 * _GIB),
        Device("RTX 4090", 165 * _T, 82.6 * _T, 82.6 * _T, 1008 * _G, 32 * _G, 24 * _GIB),
        Device("RTX 3090", 71 * _T, 35.6 * _T, 35.6 * _T, 936 * _G, 32 * _G, 24 * _GIB),
        # No maker states it: a server's, of some tens of cores.
        Device("cpu", 2 * _T, 2 * _T, 2 * _T, 200 * _G, 0.0, 256 * _GIB, launch=2e-6),
    )
}
"""Devices by name."""


def device_named(name: str) -> Device:
    """Return a device of the table by its name, in any spelling."""
    found = [device for known, device in DEVICES.items() if _plain(known) == _plain(name)]
    if not found:
        near = " or ".join(map(repr, _similar(name)))
        meant = f": {near}, perhaps?" if near else "."
        raise ValueError(
            f"There is no device {name!r} in the table{meant} There are {known_devices()}; "
            "rekindle.Device describes another"
        )
    return found[0]


def _similar(name: str) -> list[str]:
    """The names in the table that have a name in them or are in it, else those spelled alike.

    >>> _similar("A100"), _similar("NVIDIA H100 80GB HBM3"), _similar("RTX 4091")
    (['A100-80GB', 'A100-40GB'], ['H100'], ['RTX 4090'])
    """
    wanted = _plain(name)
    called = device_called(name)
    if called is not None:
        return [called.name]
    inside = [known for known in DEVICES if wanted and wanted in _plain(known)]
    plain = {_plain(known): known for known in DEVICES}
    return inside or [plain[each] for each in get_close_matches(wanted, plain, n=1, cutoff=0.7)]


def device_of(device: torch.device) -> Device | None:
    """Return the device of the table that a real one is; None if it has none such."""
    if device.type != "cuda":
        return DEVICES.get(device.type)
    return device_called(torch.cuda.get_device_name(device))


def device_called(name: str) -> Device | None:
    """Return the device of the table that a driver calls so, as in "NVIDIA A100-SXM4-80GB".

    >>> device_called("NVIDIA H100 80GB HBM3").name, device_called("another")
    ('H100', None)
    """
    words = _words_in(name)
    fitting = [known for known in DEVICES.values() if _words_in(known.name) <= words]
    return max(fitting, key=lambda known: len(_words_in(known.name)), default=None)


def usable_bytes(memory_bytes: int) -> int:
    """Return the budget that a device's memory has room for.

    A twentieth is for what torch's allocator does not give out, as the context of CUDA and NCCL,
    and for what it cannot use, because it is in pieces.
    """
    return memory_bytes - memory_bytes // 20


def known_devices() -> str:
    """Return the names in the table as text."""
    return ", ".join(repr(name) for name in DEVICES)


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _words_in(name: str) -> set[str]:
    return set(re.findall(r"\w+", name.lower()))


class OpClock(TorchDispatchMode):
    """A clock that advances by the time that each op would take on a device."""

    is_exact = True
    runs = 1

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = self.estimates = device
        self._now = 0
        """Time in whole units: so the same ops take the same time, whatever ran before."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if runs_by_rows(types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._now += round(op_seconds(self._device, func, args, kwargs, out) * _UNITS)
        return out

    def keep_busy(self, seconds: float) -> None:
        """Do nothing: estimates are those of a busy device."""

    def mark(self) -> int:
        return self._now

    def seconds(self, begin: int, end: int) -> float:
        return (end - begin) / _UNITS

    def host_seconds(self, begin: float, end: float) -> float:  # noqa: ARG002
        return 0.0

    def timed(self, step: Callable[[], None]) -> float:
        begin = self._now
        step()
        return self.seconds(begin, self._now)


_UNITS = 10**15


def op_seconds(
    device: Device, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> float:
    """Return the seconds that an op takes on a device that is kept busy."""
    if not _runs_on_device(func):
        return 0.0
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    nbytes = sum(map(_nbytes, made))
    nbytes += nbytes if packet_short_name(func) in _GATHERS else sum(map(_nbytes, given))
    dtype = next((tensor.dtype for tensor in given if tensor.is_floating_point()), torch.float32)
    seconds = device.seconds(_flops(func, args, kwargs, out), nbytes, dtype, _attends(func))
    return seconds if getattr(func, "namespace", "aten") in _KNOWN else _UNKNOWN * seconds


def comparison_device(device: torch.device) -> Device:
    """Return the device of the table by which ops on a real one are compared; else a similar one.

    For comparisons alone: two ops of one block are compared by arithmetic and bytes, which no clock
    disturbs.
    """
    found = device_of(device)
    return found if found is not None else DEVICES["H100" if device.type == "cuda" else "cpu"]


_GATHERS = ("embedding", "index", "index_select", "gather")
"""Ops that read as much as they write, however large their argument is."""
_ATTENTION = "_scaled_dot_product_"
_KNOWN = ("aten", "prims", "_c10d_functional")
_UNKNOWN = 10.0
"""Factor on the time of its memory traffic for an op of another namespace, which is unknown."""


@cache
def _runs_on_device(func: Any) -> bool:
    """Return whether an op runs a kernel: views do not, nor do allocations."""
    if func is ASKS_DEVICE or "empty" in packet_short_name(func):
        return False
    return kind_of(func) is not OpKind.VIEW


def _attends(func: Any) -> bool:
    return packet_short_name(func).startswith(_ATTENTION)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    if _attends(func):
        return _attention_flops(func, args, kwargs)
    formula = flop_registry.get(getattr(func, "overloadpacket", func))
    return float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0


def _attention_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the FLOPs of two products, or of five in backward; half of them if it is causal."""
    names = [argument.name for argument in schema_of(func).arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    *batch, tokens, width = given["query"].shape
    product: float = 2.0 * torch.Size(batch).numel() * tokens * given["key"].shape[-2] * width
    products = 5 if packet_short_name(func).endswith("_backward") else 2
    return product * products * (0.5 if given.get("is_causal") else 1.0)


def _nbytes(tensor: Tensor) -> int:
    nbytes = tensor.numel() * tensor.element_size()
    try:
        return min(nbytes, tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):  # sparse, or a subclass without a storage
        return nbytes
