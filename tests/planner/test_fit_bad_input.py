"""Models, batches and profiles that `profile` and `fit` refuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

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


def a_loader() -> Any:
    return DataLoader(torch.randn(8, 8), batch_size=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (a_loader(), r"got a DataLoader: give next\(iter\(loader\)\)"),
        (iter(a_loader()), "got a _SingleProcessDataLoaderIter: give one batch of it"),
        (TensorDataset(torch.randn(4, 8)), "got a TensorDataset"),
        ((torch.randn(4, 8), torch.randn(4, 8)), r"takes \(input\), but the batch has 2 items"),
        ({"x": torch.randn(4, 8)}, r"takes \(input\), but the batch has x"),
        ((), r"takes \(input\), but the batch has 0 items"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_the_model_cannot_be_called_with_is_no_batch(batch: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(TypeError, match=f"^A batch is what the model is called with.*{message}"):
        rekindle.fit(model, batch, "50%", loss=torch.sum)


def test_a_batch_that_hooks_put_right_is_not_refused() -> None:
    model = Stack(2)
    model.register_forward_pre_hook(lambda _module, args: args[:1])
    both = torch.randn(4, 8), torch.randn(4, 8)
    assert len(rekindle.profile(model, both, loss=torch.sum).order) == 2


def test_a_model_in_eval_mode_is_said_to_be(log_lines: Callable[[], list[str]]) -> None:
    rekindle.fit(Stack(2).eval(), torch.randn(4, 8), "1GiB", loss=torch.sum)
    [line] = log_lines()
    assert "Stack is in eval mode, and is planned so" in line
    assert "call model.train() before fit" in line
