"""Tensors that modules keep in plain attributes: seen as they were, and assigned once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.toys import same_bits


class Recurrent(nn.Module):
    """Adds what it made last time: from nothing, a tensor or a tuple, or in place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.how = how
        self.calls = 0
        if how == "none":
            self.state: Any = None
        elif how == "tensor":
            self.state = torch.ones(4)
        elif how == "tuple":
            self.state = (torch.ones(4), torch.ones(4))
        elif how == "in place":
            self.state = torch.ones(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        made = self.linear(x).tanh()
        before: Any = getattr(self, "state", None)
        if self.how == "in place":
            self.state.copy_(made)
            return (made * self.state.clone()).sin()
        self.state = (made, made.sin()) if self.how == "tuple" else made
        if before is None:
            return made.sin()
        return (made * (before[0] + before[1] if isinstance(before, tuple) else before)).sin()


HOWS = ("none", "tensor", "tuple", "in place", "absent")
every_how = pytest.mark.parametrize("how", HOWS)
Run = Callable[[nn.Module, Tensor], Tensor]
RUNS: dict[str, Run] = {
    "recomputed": rekindle.checkpoint,
    "nested": lambda module, x: rekindle.checkpoint(lambda x: rekindle.checkpoint(module, x), x),
    "in an argument": lambda module, x: rekindle.checkpoint(lambda m, x: m[0](x), [module], x),
}


def train(how: str, run: Run, backwards: int = 1) -> tuple[list[Tensor | None], Any, Recurrent]:
    """Three calls of one module, and a backward through all of them."""
    torch.manual_seed(0)
    module, x = Recurrent(how), torch.randn(4, 4, requires_grad=True)
    out = x
    for _ in range(3):
        out = run(module, out)
    for _ in range(backwards - 1):
        out.sum().backward(retain_graph=True)
    out.sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())], module.state, module


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("backwards", [1, 2])
@every_how
def test_a_tensor_in_an_attribute_is_replayed_from_what_it_was(
    how: str, backwards: int, run: Run
) -> None:
    plain = train(how, lambda module, x: module(x), backwards)
    ours = train(how, run, backwards)
    assert all(map(same_bits, plain[0], ours[0]))
    states = [state if isinstance(state, tuple) else (state,) for state in (plain[1], ours[1])]
    assert all(map(same_bits, *states))


def test_an_attribute_keeps_the_tensor_of_the_forward_and_its_graph() -> None:
    """An auxiliary loss that the training loop reads when the replay is over."""
    module, x = Recurrent("none"), torch.randn(4, 4, requires_grad=True)
    out = rekindle.checkpoint(module, x)
    kept = module.state
    out.sum().backward(retain_graph=True)
    assert module.state is kept
    kept.sum().backward()


def test_a_reentrant_region_assigns_an_attribute_once() -> None:
    module, x = Recurrent("none"), torch.randn(4, 4, requires_grad=True)
    out = rekindle.checkpoint(module, x, use_reentrant=True)
    kept = module.state
    out.sum().backward()
    assert module.state is kept


def test_counters_in_attributes_count_the_replay_as_in_torch() -> None:
    module = Recurrent("none")
    rekindle.checkpoint(module, torch.randn(4, 4, requires_grad=True)).sum().backward()
    assert module.calls == 2


def test_an_attribute_is_put_back_when_the_replay_raises() -> None:
    class Fails(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if rekindle.is_recomputing():
                raise KeyError("replay")
            return out.sin()

    module = Fails("none")
    out = rekindle.checkpoint(module, torch.randn(4, 4, requires_grad=True))
    kept = module.state
    with pytest.raises(KeyError):
        out.sum().backward()
    assert module.state is kept
