"""Calls that do not have a fitted model fitted again, and what is logged then."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.planner import runtime
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


@pytest.mark.parametrize("how", ["evaluation", "no gradients"])
def test_what_does_not_train_is_not_planned_for(how: str, log_lines: Lines) -> None:
    model = fitted()
    plan = plan_of(model)
    model.train(how != "evaluation")
    with torch.set_grad_enabled(how != "no gradients"):
        model(inputs(LARGE))
    assert plan_of(model) is plan
    assert log_lines() == []


def test_a_larger_call_in_a_replay_is_not_planned_for(log_lines: Lines) -> None:
    """Contrived: a region calls a model with more in its replay, and drops the result."""
    model = fitted()

    def region(x: Tensor) -> Tensor:
        if rekindle.is_recomputing():
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                model(inputs(LARGE))
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    rekindle.checkpoint(region, x).sum().backward()
    assert plan_of(model).inputs == ((SMALL, 16),)
    assert log_lines() == []


def test_inside_a_region_it_is_said_rather_than_done(log_lines: Lines) -> None:
    model = fitted(drop=0.0)
    x = inputs(LARGE)
    rekindle.checkpoint(model, x).square().mean().backward()
    found = [p.grad for p in model.parameters()]
    assert same(found, plain(model, LARGE))
    (line,) = log_lines()
    assert "not planned again: it is called inside a region" in line


def test_where_an_optimizer_steps_in_backward_it_is_said_rather_than_done(log_lines: Lines) -> None:
    model = fitted()
    model.blocks[0].norm.weight.register_post_accumulate_grad_hook(lambda _: None)
    grads(model, LARGE)
    (line,) = log_lines()
    assert "not planned again: a parameter has a hook" in line


def test_a_plan_that_was_applied_says_once_that_it_is_for_less(log_lines: Lines) -> None:
    model = Stack(4, 16, 0.1)
    plan = rekindle.solve(rekindle.profile(model, inputs(SMALL)), "60%")
    rekindle.apply(model, plan)
    grads(model, SMALL)
    assert log_lines() == []
    assert same(grads(model, LARGE, 2 * LARGE), plain(model, LARGE, 2 * LARGE))
    (line,) = log_lines()
    assert f"Stack is called with [{LARGE}, 16], larger than [{SMALL}, 16]" in line
    assert "the plan was applied, not fitted" in line
    assert rekindle.plan_of(model) is plan


def test_a_plan_that_knows_no_shapes_says_nothing(log_lines: Lines) -> None:
    model = fitted()
    rekindle.apply(model, replace(plan_of(model), inputs=()))
    grads(model, LARGE)
    assert log_lines() == []


def test_no_plan_for_more_is_an_error_that_says_so() -> None:
    model = fitted("200KiB")
    before, rng = plan_of(model), torch.get_rng_state()
    grads(model, SMALL)
    held = [p.grad for p in model.parameters()]
    torch.set_rng_state(rng)
    match = rf"Stack is called with \[{LARGE}, 16\], larger than .* no plan for that: No plan fits"
    with pytest.raises(rekindle.BudgetError, match=match):
        model(inputs(LARGE))
    assert rekindle.plan_of(model) is before
    assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)
    with rekindle.observe() as seen:
        assert same(grads(model, SMALL), plain(model, SMALL))
    assert seen.total.replays > 0


def test_a_compiled_model_has_no_break_from_it() -> None:
    model = fitted(budget="1GiB", drop=0.0)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(inputs(LARGE)), model(inputs(LARGE)))


def test_ranks_do_not_plan_again(log_lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fitted()
    monkeypatch.setattr(runtime, "has_other_ranks", lambda: True)
    grads(model, LARGE)
    (line,) = log_lines()
    assert "ranks would have to agree on when" in line
