"""Parameters given by functional_call, and models that are copied or pickled."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.regions.recompute.gradients import assert_same_grads, leaf, three
from tests.toys import Stack, same_bits

# Parameters that others swap in


class Inner(nn.Module):
    """A model whose middle is run by `run`."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.mlp = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.mlp, x).sin()


def test_parameters_given_by_functional_call_are_those_of_the_replay() -> None:
    """They are in the module during forward alone; backward finds the module's own again."""
    x = leaf(2, 3)

    def ways(run: Callable[..., Tensor]) -> Any:
        model = Inner(run)
        given = {n: (p.detach() * 2).requires_grad_() for n, p in model.named_parameters()}
        loss = torch.func.functional_call(model, given, (x,)).sum()
        return torch.autograd.grad(loss, [x, *given.values()])

    assert_same_grads(ways)


def test_a_step_of_model_agnostic_meta_learning_gives_the_plain_gradients() -> None:
    x = leaf(2, 3)

    def ways(run: Callable[..., Tensor]) -> Any:
        model = Inner(run)
        own = dict(model.named_parameters())
        grads = torch.autograd.grad(model(x).sum(), list(own.values()), create_graph=True)
        fast = {n: p - 0.5 * g for (n, p), g in zip(own.items(), grads, strict=True)}
        loss = torch.func.functional_call(model, fast, (x,)).pow(2).sum()
        return torch.autograd.grad(loss, [x, *own.values()])

    assert_same_grads(ways)


# Copies of models


class Checkpointed(nn.Module):
    """A model that checkpoints its blocks in forward, each in one of the two forms."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(2, drop=0.2)
        self.decorate = rekindle.checkpoint(use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.decorate(self.stack.blocks[1])(rekindle.checkpoint(self.stack.blocks[0], x))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copied_model_that_checkpoints_trains_as_the_original(
    duplicate: Callable[[nn.Module], nn.Module], trained: bool
) -> None:
    model, x = Checkpointed(), leaf(2, 8)
    if trained:
        model(x).sum().backward()
    twin = duplicate(model)
    for one in (model, twin):
        one.zero_grad()
        torch.manual_seed(1)
        one(x).sum().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert a is not b
        assert same_bits(a.grad, b.grad)


def test_a_model_can_be_copied_between_forward_and_backward() -> None:
    model, x = Checkpointed(), leaf(2, 8)
    loss = model(x).sum()
    twin = copy.deepcopy(model)
    loss.backward()
    assert all(p.grad is None for p in twin.parameters())
    assert all(p.grad is not None for p in model.parameters())


@rekindle.checkpoint(use_reentrant=False)
def decorated(x: Tensor) -> Tensor:
    return three(x)


def test_a_decorated_function_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(decorated)) is decorated
