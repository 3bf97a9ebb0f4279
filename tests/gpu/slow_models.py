"""Models with long kernels, so that copies and kernels race, and helpers to compare their steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.offload.device_offloader import DeviceOffloader
from rekindle.offload.owners import shared_offloaders
from tests.toys import same_bits

KIB, MIB = 2**10, 2**20
SLEEP = 200_000
"""Cycles of the device: about a tenth of a millisecond, many times the copies below."""


class Slow(torch.autograd.Function):
    """Keeps the device busy in forward and in backward, and changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        torch.cuda._sleep(cycles)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        torch.cuda._sleep(ctx.cycles)
        return grads[0].clone(), None


def spoil(*sizes: int) -> None:
    """Fill memory that the allocator hands out just now with NaN, as the next op might."""
    for size in sizes:
        torch.full((size // 4,), torch.nan, device="cuda")


class Layer(nn.Module):
    """Linear, GELU, Linear, and a residual; slow before and after if asked for."""

    def __init__(self, dim: int, cycles: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim, device="cuda")
        self.down = nn.Linear(2 * dim, dim, device="cuda")
        self.cycles = cycles

    def forward(self, x: Tensor) -> Tensor:
        if self.cycles:
            x = Slow.apply(x, self.cycles)
        hidden = torch.nn.functional.gelu(self.up(x))
        if self.cycles:
            spoil(hidden.nbytes, x.nbytes)
            hidden = Slow.apply(hidden, self.cycles)
        return x + self.down(hidden).tanh()


def model(depth: int = 6, dim: int = 64, cycles: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(dim, cycles) for _ in range(depth)])


def grads_of(run: Callable[[], Tensor], leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(run().square().sum(), leaves))


def assert_steps_agree(
    net: nn.Module, x: Tensor, steps: int, around: Callable[[], Any], between: Any = None
) -> None:
    leaves = [x, *net.parameters()]
    expected = grads_of(lambda: net(x), leaves)

    def run() -> Tensor:
        with around():
            out: Tensor = net(x)
        return out

    for step in range(steps):
        found = grads_of(run, leaves)
        assert all(map(same_bits, found, expected)), f"step {step}"
        if between is not None:
            between()


def only_offloader() -> DeviceOffloader:
    (found,) = [each for one in shared_offloaders() for each in one.by_device.values() if each]
    return found


def chain(x: Tensor, length: int) -> Tensor:
    """Each `exp` saves its output; nothing else is saved."""
    for _ in range(length):
        x = x.neg().exp()
    return x


def finish_backward() -> None:
    """Wait until autograd's thread for the device has let go of the last backward.

    It may do so a moment after the backward has returned, and of the results and the error only
    after what was queued for the end of the backward, for which it needs Python's lock. It has done
    all that before it begins with another backward.
    """
    (torch.zeros((), device="cuda", requires_grad=True) * 1.0).backward()
    torch.cuda.synchronize()


def fail_after(_: Tensor) -> None:
    raise ZeroDivisionError
