"""Steps whose forward runs backwards of its own, or calls its layers in another way than usual."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rekindle
from tests.toys import Block, same_bits

pytest.importorskip("scipy")


def gradients(model: nn.Module, step: Callable[[], Tensor]) -> list[Tensor | None]:
    model.zero_grad()
    step().backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_fits(model: nn.Module, step: Callable[[], Tensor], budget: str) -> rekindle.Plan:
    """Fit a step that is a function, and compare its gradients with those without a plan."""
    expected = gradients(model, step)
    plan = rekindle.fit(model, step, budget)
    assert all(map(same_bits, gradients(model, step), expected))
    rekindle.remove(model)
    return plan


def chain(count: int) -> nn.Sequential:
    return nn.Sequential(*[Block(32) for _ in range(count)])


def test_a_penalty_on_gradients_in_the_forward_does_not_end_it() -> None:
    critic, generator, noise = chain(3), chain(3), torch.randn(128, 32)
    model = nn.ModuleDict({"critic": critic, "generator": generator})

    def step() -> Tensor:
        real = noise.clone().requires_grad_()
        (slope,) = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
        out: Tensor = slope.square().mean() + critic(generator(noise)).square().mean()
        return out

    plan = assert_fits(model, step, "90%")
    assert {path.split(".")[0] for path, _, _ in plan.blocks} == {"critic", "generator"}


def test_micro_batches_whose_backward_is_in_the_function_are_planned() -> None:
    model, x = chain(4), torch.randn(256, 32)

    def step() -> Tensor:
        model(x[:128]).square().mean().backward()
        loss: Tensor = model(x[128:]).square().mean()
        return loss

    plan = assert_fits(model, step, "90%")
    assert len(plan.blocks) == 8  # both calls of each block
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget


class Reentrant(nn.Module):
    """Runs its layers in torch's reentrant checkpoints, so again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x.square().mean()


def test_blocks_that_run_again_in_backward_are_planned_once() -> None:
    model, x = Reentrant(), torch.randn(128, 32)
    plan = assert_fits(model, lambda: model(x), "90%")
    assert [path for path, _, _ in plan.blocks] == [f"layers.{i}" for i in range(4)]


class CallsForward(nn.Module):
    """Calls the forward of its layers, past their hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x.square().mean()


def test_a_model_that_calls_no_layer_is_one_block(caplog: pytest.LogCaptureFixture) -> None:
    model, x = CallsForward(), torch.randn(128, 32)
    with caplog.at_level("INFO", logger="rekindle"):
        plan = assert_fits(model, lambda: model(x), "90%")
    assert [path for path, _, _ in plan.blocks] == [""]
    assert "CallsForward calls none of its layers itself: it is one block" in caplog.text


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(16, 16, batch_first=True) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x, _ = layer(x)
        return x.square().mean()


def test_recurrent_layers_are_blocks() -> None:
    model, x = Recurrent(), torch.randn(16, 20, 16)
    plan = assert_fits(model, lambda: model(x), "70%")
    assert [path for path, _, _ in plan.blocks] == [f"layers.{i}" for i in range(4)]
