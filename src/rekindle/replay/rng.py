"""Random numbers: a replay draws what its forward drew, and nobody else notices.

The CPU generator's state is 5 kB and costs under a microsecond to copy; a CUDA generator's state is
a seed and an offset, two integers. Both are cheaper to take always than to find out whether the
region draws at all.
"""

import warnings
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

_DeviceState: TypeAlias = tuple[torch.Generator, "torch.Tensor | tuple[int, int]"]
RngState: TypeAlias = tuple[torch.Tensor, tuple[_DeviceState, ...]]
"""The state of the CPU's generator, and of every other that a region may draw from."""

_cuda_in_use = torch.cuda.is_initialized
_cpu_state = torch.default_generator.get_state
_set_cpu_state = torch.default_generator.set_state


def take(devices: Collection[torch.device], own: Sequence[torch.Generator]) -> RngState:
    """The state now of the CPU, of the current device, of `devices` and of the generators `own`."""
    named = DefaultDeviceType._default_device_type
    if not (devices or own or _cuda_in_use()) and named in (None, "cpu", "cuda", "meta"):
        return _cpu_state(), ()
    generators = {id(generator): generator for generator in own}
    if _cuda_in_use():
        current = torch.cuda.default_generators[torch.cuda.current_device()]
        generators[id(current)] = current
    if not devices and named is not None:
        devices = (torch.device(named),)
    for device in devices:
        for generator in _default_generators(device):
            generators[id(generator)] = generator
    return _cpu_state(), tuple([(g, _read(g)) for g in generators.values()])


def swap(then: RngState) -> RngState:
    """Put every generator back to where it was, and return where they are now."""
    cpu, others = then
    now = _cpu_state(), tuple([(g, _read(g)) for g, _ in others]) if others else ()
    restore(then)
    return now


def restore(then: RngState) -> None:
    """Put every generator back to where it was."""
    cpu, others = then
    _set_cpu_state(cpu)
    for generator, state in others:
        if isinstance(state, tuple):
            seed, offset = state
            if generator.initial_seed() != seed:
                generator.manual_seed(seed)
            generator.set_offset(offset)
        else:
            generator.set_state(state)


def _read(generator: torch.Generator) -> torch.Tensor | tuple[int, int]:
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    return generator.get_state()


def with_first_use(then: RngState) -> RngState:
    """`then`, and the device's generator: CUDA was used for the first time since.

    Its state at that time was the seed it still has, at offset zero.
    """
    current = torch.cuda.default_generators[torch.cuda.current_device()]
    return then[0], (*then[1], (current, (current.initial_seed(), 0)))


def _default_generators(device: torch.device) -> Sequence[torch.Generator]:
    if device.type in ("cpu", "meta") or (device.type == "cuda" and not _cuda_in_use()):
        return ()
    generators: Sequence[torch.Generator] = torch.get_device_module(device).default_generators
    if device.type == "mps":
        return (generators,)  # type: ignore[return-value]
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    return (generators[index],)


class DefaultDeviceType:
    """Device type whose RNG is preserved when no tensor argument says. As torch's class of that name."""

    _default_device_type: str | None = None

    @staticmethod
    def set_device_type(device: str = "cuda") -> None:
        DefaultDeviceType._default_device_type = device

    @staticmethod
    def get_device_type() -> str:
        if not DefaultDeviceType._default_device_type:
            accelerator = torch.accelerator.current_accelerator(True)
            DefaultDeviceType._default_device_type = accelerator.type if accelerator else "cpu"
        return DefaultDeviceType._default_device_type


def infer_device_type(*args: Any) -> str:
    """The one device type among the tensors of `args`, CPU aside: CUDA first, else the first seen."""
    found = [
        leaf.device.type
        for leaf in tree_leaves(args)
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"
    ]
    if not found:
        return DefaultDeviceType.get_device_type()
    if len(set(found)) > 1:
        warnings.warn(
            f"Tensor arguments are on several types of devices, {sorted(set(found))}: only the random "
            f"state of {'cuda' if 'cuda' in found else found[0]} devices is looked at.",
            stacklevel=2,
        )
    return "cuda" if "cuda" in found else found[0]


def get_device_states(*args: Any) -> tuple[list[int], list[torch.Tensor]]:
    """Ids and RNG states of the devices among the tensors of `args`. As torch's function."""
    ids = [
        leaf.get_device()
        for leaf in tree_leaves(args)
        if isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "meta")
    ]
    if not ids:
        return [], []
    module = torch.get_device_module(infer_device_type(*args))
    return ids, [module.get_rng_state(index) for index in ids]


def set_device_states(
    devices: Sequence[int], states: Sequence[torch.Tensor], *, device_type: str | None = None
) -> None:
    """Set the RNG states that `get_device_states` gave. As torch's function."""
    device_type = device_type or DefaultDeviceType.get_device_type()
    if device_type in ("cpu", "meta"):
        return
    module = torch.get_device_module(device_type)
    for index, state in zip(devices, states, strict=False):
        module.set_rng_state(state, index)
