"""Helpers for tests of offload by the disk tier; its fixtures are in conftest."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import rekindle
from rekindle.offload.device_offloader import DeviceOffloader
from rekindle.offload.owners import shared_offloaders
from tests.toys import assert_same_step

STEPS = 4
"""An offloader learns in the first steps; the others show what it learnt."""


def spilling(**options: Any) -> rekindle.Offload:
    """Everything that may go goes, if options do not say otherwise."""
    return rekindle.offload(tier="disk", **({"quota": 1.0, "min_bytes": 1} | options))


def leaf(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, requires_grad=True, **options)


def traffic_of(
    run: Callable[[], Tensor], steps: int = STEPS, **options: Any
) -> list[rekindle.Traffic]:
    """What each step moved."""
    found = []
    for _ in range(steps):
        with rekindle.observe() as seen:
            with spilling(**options):
                loss = run().sum()
            loss.backward()
        found.append(seen.spill)
    return found


def moved(run: Callable[[], Tensor], **options: Any) -> list[tuple[int, int]]:
    """Tensors and bytes that each step sent, and got back."""
    found = traffic_of(run, **options)
    for each in found:
        assert (each.tensors_in, each.bytes_in) == (each.tensors_out, each.bytes_out)
    return [(each.tensors_out, each.bytes_out) for each in found]


def assert_plain_gradients(
    run: Callable[[], Any], leaves: Iterable[Tensor], steps: int = STEPS, **options: Any
) -> None:
    """Every step under offload gives the outputs and gradients of the plain run, bit for bit."""

    def offloaded() -> Any:
        with spilling(**options):
            return run()

    for seed in range(steps):
        assert_same_step(run, offloaded, list(leaves), seed=seed)


def padded(x: Tensor) -> Tensor:
    """Follows what is tested: what is saved last is not moved, and here that are these three."""
    return x.sin().sin().sin()


def chain(x: Tensor, length: int = 11) -> Tensor:
    for _ in range(length):
        x = x.sin()
    return x


class Looks(torch.autograd.Function):
    """Saves tensors, and shows what backward gets for them to `seen`."""

    @staticmethod
    def forward(ctx: Any, seen: list[tuple[Tensor, ...]], *tensors: Tensor) -> Tensor:
        ctx.seen = seen
        ctx.save_for_backward(*tensors)
        return tensors[0].sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.seen.append(ctx.saved_tensors)
        return (None, *(torch.zeros_like(t) for t in ctx.saved_tensors))


def looked_at(make: Callable[[], tuple[Tensor, ...]], **options: Any) -> list[tuple[Tensor, ...]]:
    """What backward gets in each step for the saved tensors that `make` makes."""
    seen: list[tuple[Tensor, ...]] = []
    for _ in range(STEPS):
        with rekindle.observe() as counted, spilling(**options):
            out = Looks.apply(seen, *make())
            loss = out + padded(padded(leaf(4000) * 2.0)).sum()
        assert counted.spill.tensors_out
        loss.backward()
    return seen


def only_offloader() -> DeviceOffloader:
    """Returns the one device offloader that there is; see the fixture `new_offloaders`."""
    (offloader,) = shared_offloaders()
    (found,) = offloader.by_device.values()
    assert found is not None
    return found
