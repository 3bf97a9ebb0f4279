"""A plan on a model: copies, removal, other strategies, attributes that a model changes."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.planner.fitted_models import (
    LARGE,
    SMALL,
    Lines,
    fitted,
    grads,
    inputs,
    plain,
    plan_of,
    same,
)
from tests.toys import Stack

pytest.importorskip("scipy")


def test_remove_takes_all_of_it_off(log_lines: Lines) -> None:
    model = Stack(4, 16)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    rekindle.fit(model, inputs(SMALL), "60%")
    rekindle.remove(model)
    assert rekindle.plan_of(model) is None
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    grads(model, LARGE)
    assert log_lines() == []


def test_other_strategies_take_the_place_of_a_plan() -> None:
    model = fitted()
    rekindle.apply(model, "recompute")
    assert rekindle.plan_of(model) is None


def test_only_the_model_has_the_plan() -> None:
    model = fitted()
    assert rekindle.plan_of(model.blocks[0]) is None
    with pytest.raises(TypeError, match=r"plan_of\(\) takes a model, but got str"):
        rekindle.plan_of("a model")  # type: ignore[arg-type]


def test_a_profile_of_a_fitted_model_leaves_it_fitted() -> None:
    model = fitted()
    plan = plan_of(model)
    rekindle.profile(model, inputs(LARGE))
    assert rekindle.plan_of(model) is plan
    with rekindle.observe() as seen:
        grads(model, SMALL)
    assert seen.total.replays > 0
    grads(model, LARGE)
    assert plan_of(model).inputs == ((LARGE, 16),)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_is_planned_again_by_itself(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = fitted()
    twin = copied(model)
    plan = plan_of(model)
    assert plan_of(twin) == plan
    assert same(grads(twin, LARGE), plain(model, LARGE))
    assert plan_of(twin).inputs == ((LARGE, 16),)
    assert plan_of(model) is plan
    rekindle.remove(twin)
    assert not twin._forward_pre_hooks


class Noting(Stack):
    """A model that notes what it does in attributes of its own."""

    def __init__(self) -> None:
        super().__init__(3, 16)
        self.calls = 0
        self.seen: list[float] = []
        self.total = torch.zeros(())
        self.last: Tensor | None = None
        self.is_ready = False

    def forward(self, x: Tensor, run: Any = None) -> Tensor:
        out = super().forward(x)
        self.calls += 1
        self.seen.append(float(x.shape[0]))
        self.total += 1
        self.last = out.detach()
        self.is_ready = True
        return out


def test_what_a_model_notes_is_as_if_it_had_not_been_measured() -> None:
    model = Noting()
    rekindle.fit(model, inputs(SMALL), "60%")
    assert (model.calls, model.seen, float(model.total)) == (0, [], 0.0)
    model(inputs(LARGE))
    assert (model.calls, model.seen, float(model.total)) == (1, [LARGE], 1.0)


def test_a_flag_that_a_model_sets_stays_set() -> None:
    """It may stand for something that was done, and would be done twice."""
    model = Noting()
    rekindle.profile(model, inputs(SMALL))
    assert model.is_ready
