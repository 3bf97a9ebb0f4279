"""Models, batches and profiles that `profile` and `fit` refuse."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.planner.cases import unchanged
from tests.toys import Mlp, Stack

pytest.importorskip("scipy")


def test_a_model_that_an_optimizer_steps_in_backward_is_refused() -> None:
    model = Stack(2, 16)
    model.blocks[0].norm.weight.register_post_accumulate_grad_hook(lambda p: p.data.add_(1))
    with unchanged(model), pytest.raises(ValueError, match="such as an optimizer's"):
        rekindle.profile(model, torch.ones(8, 16))


@pytest.mark.parametrize(
    ("model", "batch", "match"),
    [
        (Mlp(8), torch.randn(4, 8), "is of a Stack, but the model is a Mlp"),
        (
            Stack(2),
            torch.randn(6, 8),
            r"is of a batch float32\[4, 8\], but the batch is float32\[6, 8\]",
        ),
    ],
)
def test_a_profile_of_something_else_is_refused(
    model: nn.Module, batch: Tensor, match: str
) -> None:
    profile = rekindle.profile(Stack(2), torch.randn(4, 8))
    with pytest.raises(ValueError, match=match):
        rekindle.fit(model, batch, "60%", profile=profile)


def test_what_is_no_profile_is_refused() -> None:
    with pytest.raises(TypeError, match="profile should be a Profile, but got dict"):
        rekindle.fit(Stack(2), torch.randn(4, 8), "60%", profile={})  # type: ignore[arg-type]


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="No parameter of the model requires a gradient"):
        rekindle.profile(nn.ReLU(), torch.randn(4))


def test_a_model_that_learns_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="No parameter of the model requires a gradient"):
        rekindle.fit(Stack(2).requires_grad_(False), torch.randn(4, 8), "50%")


def test_a_step_whose_result_needs_no_gradient_is_refused() -> None:
    with torch.no_grad(), pytest.raises(ValueError, match="requires no gradient"):
        rekindle.profile(Stack(2), torch.randn(4, 8))


@pytest.mark.parametrize("model", ["a model", None, Stack], ids=["text", "None", "a class"])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="takes a model"):
        rekindle.fit(model, torch.randn(4, 8), "50%")


def test_a_function_that_does_not_run_the_model_is_refused() -> None:
    other = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="block"):
        rekindle.fit(Stack(2), lambda: other(torch.randn(2, 4)).sum(), "50%")


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="optimizer"):
        rekindle.profile(Stack(2), torch.randn(4, 8), optimizer="AdamW")
