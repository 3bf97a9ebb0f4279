"""Random state: a replay draws what its forward drew, and no other code sees a difference.

The CPU generator's state is 5 kB, a CUDA generator's is a seed and an offset in 16 bytes, also
while a CUDA graph is captured. Both are cheaper to read always than to find out whether the region
draws at all.
"""

import warnings
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rekindle.torch_private.cuda import cuda_in_use, current_cuda_device
from rekindle.torch_private.pytrees import tree_leaves

RngState: TypeAlias = tuple[Tensor, tuple[tuple[torch.Generator, Tensor], ...]]
"""The state of the CPU's generator, and of every other that a region may draw from."""

_cpu_state = torch.default_generator.get_state
_set_cpu_state = torch.default_generator.set_state


def snapshot(
    devices: Collection[torch.device],
    own: Sequence[torch.Generator] = (),
    has_cuda: bool | None = None,
) -> RngState:
    """The state now of the CPU, of the current device, of `devices` and of the generators `own`.

    `has_cuda` is whether CUDA is in use, where that is known.
    """
    named = DefaultDeviceType._default_device_type
    if has_cuda is None:
        has_cuda = cuda_in_use()
    if not (devices or own or has_cuda) and named in (None, "cpu", "cuda", "meta"):
        return _cpu_state(), ()
    generators = {id(generator): generator for generator in own}
    if has_cuda:
        current = torch.cuda.default_generators[current_cuda_device()]
        generators[id(current)] = current
    if not devices and named is not None:
        devices = (torch.device(named),)
    for device in devices:
        for generator in _default_generators(device):
            generators[id(generator)] = generator
    return _cpu_state(), tuple([(g, g.get_state()) for g in generators.values()])


def now(then: RngState) -> RngState:
    """The state now of the generators of a snapshot."""
    return _cpu_state(), tuple([(g, g.get_state()) for g, _ in then[1]]) if then[1] else ()


def restore(then: RngState) -> None:
    """Set every generator of a snapshot to the state it has there."""
    cpu, others = then
    _set_cpu_state(cpu)
    for generator, state in others:
        generator.set_state(state)


def with_first_use(then: RngState) -> RngState:
    """`then`, and the device's generator: CUDA was used for the first time since.

    Its state at that time was the seed it still has, at offset zero.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.get_state()
    state[8:] = 0
    return then[0], (*then[1], (generator, state))


def _default_generators(device: torch.device) -> Sequence[torch.Generator]:
    if device.type in ("cpu", "meta") or (device.type == "cuda" and not cuda_in_use()):
        return ()
    generators: Sequence[torch.Generator] = torch.get_device_module(device).default_generators
    if device.type == "mps":
        return (generators,)  # type: ignore[return-value]
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    return (generators[index],)


class DefaultDeviceType:
    """Device type whose RNG is preserved when no tensor argument says. As torch's class."""

    _default_device_type: str | None = None

    @staticmethod
    def set_device_type(device: str = "cuda") -> None:
        DefaultDeviceType._default_device_type = device

    @staticmethod
    def get_device_type() -> str:
        if not DefaultDeviceType._default_device_type:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            DefaultDeviceType._default_device_type = accelerator.type if accelerator else "cpu"
        return DefaultDeviceType._default_device_type


def infer_device_type(*args: Any) -> str:
    """The device type of the tensors in `args`, CPU aside: CUDA first, else the first seen."""
    found = [
        leaf.device.type
        for leaf in tree_leaves(args)
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu"
    ]
    if not found:
        return DefaultDeviceType.get_device_type()
    if len(set(found)) > 1:
        warnings.warn(
            f"Tensor arguments are on several types of devices, {sorted(set(found))}: only the "
            f"random state of {'cuda' if 'cuda' in found else found[0]} devices is looked at.",
            stacklevel=2,
        )
    return "cuda" if "cuda" in found else found[0]


def get_device_states(*args: Any) -> tuple[list[int], list[Tensor]]:
    """Ids and RNG states of the devices among the tensors of `args`. As torch's function."""
    ids = [
        leaf.get_device()
        for leaf in tree_leaves(args)
        if isinstance(leaf, Tensor) and leaf.device.type not in ("cpu", "meta")
    ]
    if not ids:
        return [], []
    module = torch.get_device_module(infer_device_type(*args))
    return ids, [module.get_rng_state(index) for index in ids]


def set_device_states(
    devices: Sequence[int], states: Sequence[Tensor], *, device_type: str | None = None
) -> None:
    """Set the RNG states that `get_device_states` gave. As torch's function."""
    device_type = device_type or DefaultDeviceType.get_device_type()
    if device_type in ("cpu", "meta"):
        return
    module = torch.get_device_module(device_type)
    for index, state in zip(devices, states, strict=False):
        module.set_rng_state(state, index)
