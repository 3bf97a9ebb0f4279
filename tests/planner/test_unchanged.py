"""`profile` and `fit` leave a model as it was, but for the forwards of a plan."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from tests.planner.cases import Case, every_case, sequential, step, unchanged, with_buffers
from tests.toys import Stack, same_bits

pytest.importorskip("scipy")


@every_case
def test_a_profile_leaves_all_as_it_was(case: Callable[[], Case]) -> None:
    model, batch = case()
    with unchanged(model):
        rekindle.profile(model, batch)


@every_case
def test_a_profile_leaves_gradients_that_were_there(case: Callable[[], Case]) -> None:
    model, batch = case()
    step(model, batch)
    with unchanged(model):
        rekindle.profile(model, batch)


def test_a_profile_leaves_buffers_that_a_forward_replaces() -> None:
    class Counting(Stack):
        steps: Tensor

        def __init__(self) -> None:
            super().__init__(2, 16)
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x: Tensor, run: Any = None) -> Tensor:
            self.steps = self.steps + 1
            return super().forward(x)

    model, x = Counting(), torch.randn(8, 16)
    with unchanged(model):
        rekindle.profile(model, x)


def test_a_profile_leaves_the_state_of_the_optimizer() -> None:
    model, batch = sequential()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, batch)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    rekindle.profile(model, batch, optimizer=optimizer)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for index, values in before["state"].items():
        assert all(same_bits(value, after["state"][index][key]) for key, value in values.items())


def test_a_profile_leaves_an_optimizer_without_state_without_state() -> None:
    model, batch = sequential()
    optimizer = torch.optim.AdamW(model.parameters())
    rekindle.profile(model, batch, optimizer=optimizer)
    assert not optimizer.state


def test_a_profile_that_fails_leaves_all_as_it_was() -> None:
    model, too_narrow = Stack(2, 16), torch.randn(8, 5)
    step(model, torch.randn(8, 16))
    rekindle.apply(model, {"blocks.0": "recompute"})
    with unchanged(model), pytest.raises(RuntimeError):
        rekindle.profile(model, too_narrow)


def test_a_fit_that_fails_leaves_all_as_it_was() -> None:
    model, batch = sequential()
    rekindle.apply(model, {"1": "recompute"})
    with unchanged(model), pytest.raises(rekindle.BudgetError):
        rekindle.fit(model, batch, "100B")


def test_a_fit_changes_nothing_but_forwards() -> None:
    model, batch = with_buffers()
    plan = None
    with unchanged(model):
        plan = rekindle.fit(model, batch, "80%")
        rekindle.remove(model)
    assert plan is not None
