"""Every way to ask autograd for gradients: those of a region are those of the plain run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from tests.regions.recompute.gradients import assert_same_grads, leaf, replays, three
from tests.toys import Block, Mlp

# Which gradients


def test_autograd_grad_gives_the_plain_gradients() -> None:
    model, x = Block(), leaf(2, 8)
    assert_same_grads(
        lambda run: torch.autograd.grad(run(model, x).sum(), [x, *model.parameters()])
    )


def test_autograd_grad_of_a_few_inputs_replays_once() -> None:
    model, x = Block(), leaf(2, 8)
    assert replays(lambda: torch.autograd.grad(rekindle.checkpoint(model, x).sum(), [x])) == 1


def test_autograd_grad_to_an_activation_outside_the_region_works() -> None:
    x = leaf(3)

    def ways(run: Callable[..., Tensor]) -> Any:
        hidden = x.exp()
        return torch.autograd.grad(run(three, hidden).sum(), [hidden])

    assert_same_grads(ways)


def test_backward_with_inputs_fills_only_those() -> None:
    model, x = Block(), leaf(2, 8)

    def ways(run: Callable[..., Tensor]) -> list[Tensor | None]:
        model.zero_grad()
        x.grad = None
        run(model, x).sum().backward(inputs=[model.norm.weight])
        assert x.grad is None
        assert model.mlp.up.weight.grad is None
        return [model.norm.weight.grad]

    assert_same_grads(ways)


def test_backward_one_parameter_at_a_time_gives_each_its_gradient() -> None:
    model, x = Block(), leaf(2, 8)

    def ways(run: Callable[..., Tensor]) -> list[Tensor]:
        loss = run(model, x).sum()
        return [
            torch.autograd.grad(loss, p, retain_graph=True)[0] for p in [x, *model.parameters()]
        ]

    assert_same_grads(ways)


def test_a_gradient_that_is_given_to_backward_is_used() -> None:
    x, seed = leaf(3), torch.randn(3)
    assert_same_grads(lambda run: torch.autograd.grad(run(three, x), [x], grad_outputs=[seed]))


def test_batched_gradients_give_the_plain_jacobian() -> None:
    x, rows = leaf(3), torch.eye(3)
    assert_same_grads(
        lambda run: torch.autograd.grad(
            run(three, x), [x], grad_outputs=[rows], is_grads_batched=True
        )
    )


# How often


def test_backward_twice_with_retain_graph_adds_up_as_plain() -> None:
    x = leaf(3)

    def ways(run: Callable[..., Tensor]) -> list[Tensor | None]:
        x.grad = None
        loss = run(three, x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad]

    assert_same_grads(ways)


def test_each_backward_with_retain_graph_replays_once() -> None:
    x = leaf(3)
    with rekindle.observe() as seen:
        loss = rekindle.checkpoint(three, x).sum()
        for count in (1, 2, 3):
            loss.backward(retain_graph=True)
            assert seen.total.replays == count
        loss.backward()
    assert seen.total.replays == 4


def test_a_second_backward_without_retain_graph_is_autograds_own_error() -> None:
    loss = rekindle.checkpoint(three, leaf(3)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (2, 1, 0)])
def test_any_part_of_several_outputs_may_be_used(used: tuple[int, ...]) -> None:
    x, y = leaf(3), leaf(3)

    def region(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared = x.sin().exp()
        return shared.cos(), (shared * y).sin(), y.exp().cos()

    def ways(run: Callable[..., Any]) -> Any:
        out = run(region, x, y)
        loss = sum((out[i].sum() for i in used), torch.zeros(()))
        return [g for g in torch.autograd.grad(loss, [x, y], allow_unused=True) if g is not None]

    assert_same_grads(ways)


def test_a_replay_for_one_output_runs_no_op_after_the_last_that_is_needed() -> None:
    """The other output is gone, and with it what was saved for it: only sin and exp run again."""
    x = leaf(3)
    with rekindle.observe() as seen:
        first, _ = rekindle.checkpoint(lambda x: (three(x), x.cos().sin().tanh()), x)
        del _
        first.sum().backward()
    assert seen.total.ops_replayed == 2


def test_outputs_may_go_backward_one_after_the_other() -> None:
    x = leaf(3)

    def ways(run: Callable[..., Any]) -> list[Tensor | None]:
        x.grad = None
        a, b = run(lambda x: (three(x), x.cos().sin()), x)
        a.sum().backward()
        b.sum().backward()
        return [x.grad]

    assert_same_grads(ways)


# Higher derivatives


def test_double_backward_gives_the_plain_gradient_penalty() -> None:
    model, x = Mlp(), leaf(2, 8)

    def ways(run: Callable[..., Tensor]) -> Any:
        out = run(model, x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        penalty = out.sum() + (grad.norm() - 1) ** 2
        return [grad, *torch.autograd.grad(penalty, [x, *model.parameters()], allow_unused=True)][
            :-1  # the last bias has no part in the penalty of a sum
        ]

    assert_same_grads(ways)


def test_third_derivatives_are_the_plain_ones() -> None:
    x = leaf(3)

    def ways(run: Callable[..., Tensor]) -> list[Tensor]:
        grads, out = [], run(three, x)
        for _ in range(3):
            (out,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            grads.append(out)
        return grads

    assert_same_grads(ways)


def test_backward_with_create_graph_then_backward_of_the_gradient_works() -> None:
    x = leaf(3)

    def ways(run: Callable[..., Tensor]) -> list[Tensor]:
        (grad,) = torch.autograd.grad(run(three, x).pow(2).sum(), x, create_graph=True)
        return [grad, *torch.autograd.grad(grad.sin().sum(), x)]

    assert_same_grads(ways)
