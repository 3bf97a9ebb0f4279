"""Modules that change their buffers, and a training loop to compare them in."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rekindle
from tests.toys import same_bits

Run = Callable[..., Any]


def plain(function: Run, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def train(
    model: nn.Module, program: Callable[[nn.Module, Tensor, Run], Tensor], run: Run, steps: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Some steps of SGD on a copy of the model: all gradients on the way, and its final state."""
    torch.manual_seed(0)
    model = copy.deepcopy(model)
    grads = []
    for _ in range(steps):
        x = torch.randn(4, 8, requires_grad=True)
        program(model, x, run).square().sum().backward()
        with torch.no_grad():
            for leaf in (x, *model.parameters()):
                if leaf.grad is not None:
                    grads.append(leaf.grad)
                    leaf.sub_(0.01 * leaf.grad)
                    leaf.grad = None
    return grads, [*model.parameters(), *model.buffers()]


def assert_trains_alike(
    model: nn.Module,
    program: Callable[[nn.Module, Tensor, Run], Tensor] = lambda model, x, run: run(model, x),
    run: Run = rekindle.checkpoint,
    steps: int = 1,
) -> None:
    """Gradients and final state, buffers included, are those of the plain run, bit for bit."""
    grads_a, state_a = train(model, program, plain, steps)
    grads_b, state_b = train(model, program, run, steps)
    assert len(grads_a) == len(grads_b)
    for i, (a, b) in enumerate(zip(grads_a, grads_b, strict=True)):
        assert same_bits(a, b), f"gradient {i} differs"
    for i, (a, b) in enumerate(zip(state_a, state_b, strict=True)):
        assert same_bits(a, b), f"parameter or buffer {i} differs"


class Scaled(nn.Module):
    """Base of toys whose buffer decides the output: a wrong buffer is a wrong gradient."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("scale", scale)

    def apply_scale(self, x: Tensor) -> Tensor:
        return (self.lin(x) * self.scale.flatten()[:8].mean()).sin()


class InPlace(Scaled):
    """The same, written in place."""

    def __init__(self, size: int = 8) -> None:
        super().__init__(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.apply_scale(x)
        self.scale.mul_(0.9).add_(0.1 * x.detach().mean())
        return y


class Counting(nn.Module):
    """An integer buffer that counts calls and decides the output."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return (self.lin(x) * self.calls.clone()).sin()
