"""Modules are in replay in the mode of their forward; all is as before after an exception."""

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.regions.recompute.buffered import InPlace, Run, assert_trains_alike

# Modes


class ModeDecides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.lin(x))
        return x.exp() if self.training else x.sin()


def test_eval_between_forward_and_backward_does_not_reach_the_replay() -> None:
    def program(model: nn.Module, x: Tensor, run: Run) -> Tensor:
        y = run(model.train(), x)
        model.eval()
        return y

    assert_trains_alike(ModeDecides(), program, steps=2)


def test_modes_set_between_forward_and_backward_are_as_set_after_it() -> None:
    model, x = ModeDecides(), torch.randn(4, 8, requires_grad=True)
    y = rekindle.checkpoint(model, x)
    model.drop.eval()
    y.sum().backward()
    assert model.training
    assert model.lin.training
    assert not model.drop.training


def test_modes_are_as_before_after_an_exception_in_replay() -> None:
    class Raising(ModeDecides):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if rekindle.is_recomputing():
                raise KeyError("in replay")
            return y.exp()

    model = Raising()
    y = rekindle.checkpoint(model, torch.randn(4, 8, requires_grad=True))
    model.eval()
    with pytest.raises(KeyError):
        y.sum().backward()
    assert not any(module.training for module in model.modules())


def test_buffers_are_as_before_after_an_exception_in_replay() -> None:
    class Raising(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if rekindle.is_recomputing():
                raise KeyError("in replay")
            return y.exp()

    model = Raising()
    y = rekindle.checkpoint(model, torch.randn(4, 8, requires_grad=True))
    buffer, before = model.scale, model.scale.clone()
    with pytest.raises(KeyError):
        y.sum().backward()
    assert model.scale is buffer
    assert torch.equal(model.scale, before)
