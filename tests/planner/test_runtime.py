"""A fitted model in training: fitted again for larger inputs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.modules.forward import forward_of
from rekindle.planner import runtime
from rekindle.strategy import Keep, Selective
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
from tests.toys import Block, Stack

pytest.importorskip("scipy")


def test_a_plan_knows_the_shapes_that_the_model_was_called_with(tmp_path: Path) -> None:
    plan = plan_of(fitted())
    assert plan.inputs == ((SMALL, 16),)
    plan.save(tmp_path / "plan.json")
    assert rekindle.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("rows", [SMALL, 7])
def test_no_more_than_was_planned_for_leaves_the_plan(rows: int, log_lines: Lines) -> None:
    model = fitted()
    plan = plan_of(model)
    assert same(grads(model, rows), plain(model, rows))
    assert plan_of(model) is plan
    assert log_lines() == []


def test_more_than_was_planned_for_is_planned_again_before_the_call_runs(log_lines: Lines) -> None:
    model = fitted()
    held: list[rekindle.Plan | None] = []
    block = model.blocks[0]
    handle = block.register_forward_pre_hook(lambda *_: held.append(rekindle.plan_of(model)))
    found = grads(model, LARGE)
    handle.remove()
    after = plan_of(model)
    assert held[-1] is after
    assert after.inputs == ((LARGE, 16),)
    assert after.measured_peak is not None
    assert after.measured_peak <= after.budget
    assert any(option.strategy != Keep() for _, _, option in after.blocks)
    assert same(found, plain(model, LARGE))


def test_one_line_says_what_changed(log_lines: Lines) -> None:
    model = fitted()
    before = plan_of(model)
    grads(model, LARGE)
    grads(model, LARGE)
    (line,) = log_lines()
    after = plan_of(model)
    for part in (
        f"Stack is called with [{LARGE}, 16], larger than [{SMALL}, 16]",
        "planned again",
        f"peaked at {runtime.format_bytes(before.measured_peak or 0)}",
        f"will at {runtime.format_bytes(after.measured_peak or 0)} now",
    ):
        assert part in line


def test_the_larger_plan_is_for_smaller_calls_after(log_lines: Lines) -> None:
    model = fitted()
    grads(model, LARGE)
    plan = plan_of(model)
    assert same(grads(model, SMALL), plain(model, SMALL))
    assert plan_of(model) is plan
    assert len(log_lines()) == 1


def test_a_share_is_one_of_the_larger_step_and_bytes_stay_bytes() -> None:
    share = fitted("60%")
    first = plan_of(share).budget
    grads(share, LARGE)
    assert plan_of(share).budget > first
    absolute = fitted("1MiB")
    grads(absolute, LARGE)
    assert plan_of(absolute).budget == 2**20


def test_gradients_that_add_up_are_those_without_a_plan() -> None:
    model = fitted()
    rows = SMALL, LARGE, SMALL
    assert same(grads(model, *rows), plain(model, *rows))
    assert plan_of(model).inputs == ((LARGE, 16),)


def test_gradients_that_are_there_stay_the_same_tensors() -> None:
    model = fitted()
    grads(model, SMALL)
    held = [p.grad for p in model.parameters()]
    model(inputs(LARGE))
    assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))


def test_a_call_that_waits_for_its_backward_is_not_disturbed() -> None:
    """Buffers that a graph uses are not written to."""

    class Scaled(Stack):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__(4, 16)
            self.register_buffer("scale", torch.full((16,), 2.0))

        def forward(self, x: Tensor, run: Any = None) -> Tensor:
            return super().forward(x) * self.scale

    def both(model: nn.Module) -> list[Tensor | None]:
        model.zero_grad()
        first, second = model(inputs(SMALL)), model(inputs(LARGE))
        (first.square().mean() + second.mean()).backward()
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    model = Scaled()
    expected = both(model)
    rekindle.fit(model, inputs(SMALL), "60%")
    assert same(both(model), expected)


def test_inputs_that_are_part_of_a_graph_keep_it() -> None:
    model, first = fitted(drop=0.0), nn.Linear(16, 16)

    def step(model: nn.Module) -> Tensor:
        first.zero_grad()
        model.zero_grad()
        model(first(inputs(LARGE))).square().mean().backward()
        assert first.weight.grad is not None
        return first.weight.grad.clone()

    twin = copy.deepcopy(model)
    rekindle.remove(twin)
    assert same([step(model)], [step(twin)])
    assert plan_of(model).inputs == ((LARGE, 16),)


def test_a_function_is_compared_by_what_the_model_was_called_with(log_lines: Lines) -> None:
    torch.manual_seed(0)
    model, small = Stack(4, 16), inputs(SMALL)
    rekindle.fit(model, lambda: model(small).square().mean(), "60%")
    assert plan_of(model).inputs == ((SMALL, 16),)
    grads(model, SMALL)
    assert log_lines() == []
    assert same(grads(model, LARGE), plain(model, LARGE))
    assert plan_of(model).inputs == ((LARGE, 16),)


def test_what_a_function_does_with_the_result_is_taken_to_grow() -> None:
    torch.manual_seed(0)
    model, small = Stack(2, 16), inputs(SMALL)

    def loss() -> Tensor:
        out = model(small)
        return torch.cat([out.exp() for _ in range(32)]).square().mean()

    def rest(plan: rekindle.Plan) -> int:
        return plan.plain_peak if plan.peak_at == "the head and the loss" else 0

    assert rest(rekindle.fit(model, loss, "1GiB")) > 0
    first = plan_of(model).plain_peak
    model(inputs(LARGE))
    assert plan_of(model).peak_at == "the head and the loss"
    assert plan_of(model).plain_peak > 3 * first


def test_single_numbers_among_the_arguments_do_not_count(log_lines: Lines) -> None:
    class Scaled(Stack):
        def forward(self, x: Tensor, run: Any = None, by: Any = 1) -> Tensor:
            return super().forward(x) * by

    model = Scaled(4, 16)
    rekindle.fit(model, inputs(SMALL), "60%")
    model(inputs(SMALL), by=torch.tensor(2.0)).sum().backward()
    assert log_lines() == []


def test_a_model_that_is_one_block_runs_the_larger_call_by_the_new_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the times of a table: which option is the fastest that fits depends on them."""
    torch.manual_seed(0)
    model = Block(16, 0.1)
    small, profile = (
        rekindle.profile(model, inputs(rows), device="meta", like="cpu") for rows in (SMALL, LARGE)
    )
    curve = rekindle.frontier(profile, 2)
    rekindle.fit(model, inputs(SMALL), (curve[0].peak + curve[1].peak) // 2, profile=small)
    assert [option.strategy for _, _, option in plan_of(model).blocks] == [Keep()]
    called = forward_of(model)
    monkeypatch.setattr("rekindle.planner.fit.profile_model", lambda *_, **__: profile)
    assert same(grads(model, LARGE), plain(model, LARGE))
    assert [type(option.strategy) for _, _, option in plan_of(model).blocks] == [Selective]
    found = forward_of(model)
    assert found is not None
    assert called is not None
    assert (called.strategy, called.is_on) == (found.strategy, True)
    rekindle.remove(model)
    assert forward_of(model) is None


def test_the_optimizer_is_counted_when_a_model_is_planned_again() -> None:
    def static(optimizer: bool) -> int:
        torch.manual_seed(0)
        model = Stack(4, 16)
        given = torch.optim.AdamW(model.parameters()) if optimizer else None
        rekindle.fit(model, inputs(SMALL), "1GiB", optimizer=given)
        model(inputs(LARGE))
        return plan_of(model).plain_peak

    state = 2 * sum(p.nbytes for p in Stack(4, 16).parameters())
    assert static(True) - static(False) == state
