"""A region that takes gradients itself, in its forward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rekindle
from tests.regions.recompute.gradients import assert_same_grads, leaf, plain, three
from tests.toys import assert_same_step


def test_gradients_taken_inside_a_region_are_the_plain_ones() -> None:
    """Forces as the negative gradient of an energy, and a loss on both."""
    w, x = leaf(3), leaf(3)

    def energy_and_forces(x: Tensor) -> tuple[Tensor, Tensor]:
        energy = (x * w).sin().exp().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, -slope

    def ways(run: Callable[..., Any]) -> list[Tensor]:
        energy, forces = run(energy_and_forces, x)
        loss = energy + (forces - 1).pow(2).sum()
        return [energy, forces, *torch.autograd.grad(loss, [x, w])]

    assert_same_grads(ways)


def test_a_gradient_taken_inside_a_region_for_a_tensor_outside_it_is_the_plain_one() -> None:
    """Energies from features, forces for the positions that the features were made from."""
    positions = leaf(3)

    def step(run: Callable[..., Tensor]) -> Tensor:
        features = positions.exp()

        def forces(features: Tensor) -> Tensor:
            energy = features.sin().sum()
            return torch.autograd.grad(energy, positions, create_graph=True)[0].exp()

        return run(forces, features)

    assert_same_step(lambda: step(plain), lambda: step(rekindle.checkpoint), [positions])


def test_a_gradient_taken_inside_for_an_argument_given_twice_is_the_plain_one() -> None:
    x = leaf(3)

    def region(a: Tensor, b: Tensor) -> Tensor:
        return torch.autograd.grad((a * b).sin().sum(), a, create_graph=True)[0].exp()

    assert_same_step(lambda: region(x, x), lambda: rekindle.checkpoint(region, x, x), [x])


def test_a_gradient_taken_inside_for_an_argument_that_is_also_in_the_closure_is_the_plain_one() -> (
    None
):
    x = leaf(3)

    def region(a: Tensor) -> Tensor:
        return torch.autograd.grad((a * x).sin().sum(), a, create_graph=True)[0].exp()

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_a_region_that_takes_gradients_inside_replays_once_in_forward_and_once_in_backward() -> (
    None
):
    x = leaf(3)

    def forces(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)[0]

    with rekindle.observe() as seen:
        out = rekindle.checkpoint(forces, x)
        assert seen.total.replays == 1
        out.sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (1, 2)


def test_gradients_taken_inside_a_region_with_dropout_leave_the_random_state_alone() -> None:
    x = leaf(32)

    def forces(x: Tensor) -> Tensor:
        energy = nn.functional.dropout(x.sin(), 0.5).exp().sum()
        slope = torch.autograd.grad(energy, x, create_graph=True)[0]
        return slope * torch.rand(32)

    assert_same_step(lambda: forces(x), lambda: rekindle.checkpoint(forces, x), [x])


def test_a_backward_inside_a_nested_region_gives_the_plain_gradients() -> None:
    x = leaf(3)

    def forces(x: Tensor) -> Tensor:
        energy = rekindle.checkpoint(three, x).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    def plain_forces(x: Tensor) -> Tensor:
        return torch.autograd.grad(three(x).sum(), x, create_graph=True)[0]

    assert_same_step(lambda: plain_forces(x), lambda: rekindle.checkpoint(forces, x), [x])
