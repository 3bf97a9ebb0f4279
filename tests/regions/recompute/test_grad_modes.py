"""Parts of a region, regions and backwards under no_grad and inference mode; anomaly mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from tests.regions.recompute.gradients import leaf, plain, three
from tests.toys import Mlp, assert_same_step, same_bits

# Parts without gradient


def test_detached_tensors_inside_a_region_pass_no_gradient() -> None:
    x = leaf(3)
    assert_same_step(
        lambda: x.sin() * x.exp().detach().cos(),
        lambda: rekindle.checkpoint(lambda x: x.sin() * x.exp().detach().cos(), x),
        [x],
    )


def test_a_no_grad_part_inside_a_region_stays_without_gradient() -> None:
    model, x = Mlp(), leaf(2, 8)

    def region(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = model(x)
        return (model(x.sin()) - target) ** 2

    assert_same_step(
        lambda: region(x), lambda: rekindle.checkpoint(region, x), [x, *model.parameters()]
    )


def test_an_enable_grad_part_in_a_region_under_no_grad_is_plain() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x.sin().exp()

    def step(run: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return run(region, x)

    assert_same_step(lambda: step(plain), lambda: step(rekindle.checkpoint), [x])


def test_backward_called_under_no_grad_gives_the_plain_gradients() -> None:
    x = leaf(3)

    def under_no_grad(loss: Tensor) -> None:
        with torch.no_grad():
            loss.backward()

    assert_same_step(
        lambda: three(x), lambda: rekindle.checkpoint(three, x), [x], backward=under_no_grad
    )


def test_backward_called_under_inference_mode_gives_the_plain_gradients() -> None:
    x = leaf(3)

    def under_inference_mode(loss: Tensor) -> None:
        with torch.inference_mode():
            loss.backward()

    assert_same_step(
        lambda: three(x), lambda: rekindle.checkpoint(three, x), [x], backward=under_inference_mode
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_region_without_gradients_costs_and_holds_nothing(mode: Callable[[], Any]) -> None:
    x = leaf(3)
    with rekindle.observe() as seen, mode():
        out = rekindle.checkpoint(three, x)
    assert same_bits(out, three(x))
    assert seen.regions == {}


def test_anomaly_detection_does_not_disturb_a_replay() -> None:
    x = leaf(3)

    def step(run: Callable[..., Tensor]) -> Tensor:
        with torch.autograd.set_detect_anomaly(True):
            out = run(three, x)
            (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return grad

    assert_same_step(lambda: step(plain), lambda: step(rekindle.checkpoint), [x])


# Looking at what is saved


def test_a_saved_tensor_read_outside_a_backward_is_the_plain_one() -> None:
    x = leaf(3)
    out = rekindle.checkpoint(three, x)
    assert same_bits(out.grad_fn._saved_self, x.sin().exp())


def test_a_saved_tensor_read_outside_a_backward_leaves_the_backward_right() -> None:
    x = leaf(3)

    def step() -> Tensor:
        out = rekindle.checkpoint(three, x)
        assert out.grad_fn._saved_self is not None
        return out

    assert_same_step(lambda: three(x), step, [x])
