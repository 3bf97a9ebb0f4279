"""What happens between a forward and its backward, and must not change the gradients."""

from collections.abc import Callable

import torch

from tests.programs.training import Training
from tests.programs.world import ROWS, WIDTH, set_seed


def _nothing(t: Training) -> None:
    pass


def _draw_numbers(t: Training) -> None:
    torch.rand(3, device=t.machine.device)
    torch.rand(3, device=t.machine.device, generator=t.generator)


def _reseed(t: Training) -> None:
    set_seed(99)


def _evaluate(t: Training) -> None:
    t.world.eval()


def _run_modules(t: Training) -> None:
    x = torch.ones(ROWS, WIDTH, device=t.machine.device)
    with torch.no_grad():
        t.world.batch_norm(t.world.count(t.world.average(x)))


MEANWHILE: dict[str, Callable[[Training], None]] = {
    "nothing": _nothing,
    "random numbers are drawn": _draw_numbers,
    "the seed is set": _reseed,
    "the modules are put in eval mode": _evaluate,
    "the modules with buffers run again": _run_modules,
}
