"""A fitted model in training: planned again for larger inputs, and left alone otherwise."""

import copy
import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.modules.forward import forward_of
from rekindle.planner import runtime
from rekindle.strategy import Keep, Selective
from tests.toys import Block, Stack, same_bits

pytest.importorskip("scipy")

SMALL, LARGE = 128, 512


def fitted(budget: int | str = "60%", drop: float = 0.1, rows: int = SMALL) -> Stack:
    torch.manual_seed(0)
    model = Stack(4, 16, drop)
    rekindle.fit(model, inputs(rows), budget)
    return model


def inputs(rows: int) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))


def grads(model: nn.Module, *rows: int) -> list[Tensor | None]:
    """Of one step on several micro-batches, from a fixed seed."""
    model.zero_grad()
    torch.manual_seed(1)
    for count in rows:
        model(inputs(count)).square().mean().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def plain(model: nn.Module, *rows: int) -> list[Tensor | None]:
    twin = copy.deepcopy(model)
    rekindle.remove(twin)
    return grads(twin, *rows)


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def plan_of(model: nn.Module) -> rekindle.Plan:
    plan = rekindle.plan_of(model)
    assert plan is not None
    return plan


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The log lines so far."""
    caplog.set_level(logging.WARNING, "rekindle")
    return lambda: [record.getMessage() for record in caplog.records]


Lines = Callable[[], list[str]]


def test_a_plan_knows_the_shapes_that_the_model_was_called_with(tmp_path: Path) -> None:
    plan = plan_of(fitted())
    assert plan.inputs == ((SMALL, 16),)
    plan.save(tmp_path / "plan.json")
    assert rekindle.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("rows", [SMALL, 7])
def test_no_more_than_was_planned_for_leaves_the_plan(rows: int, lines: Lines) -> None:
    model = fitted()
    plan = plan_of(model)
    assert same(grads(model, rows), plain(model, rows))
    assert plan_of(model) is plan
    assert lines() == []


def test_more_than_was_planned_for_is_planned_again_before_the_call_runs(lines: Lines) -> None:
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


def test_one_line_says_what_changed(lines: Lines) -> None:
    model = fitted()
    before = plan_of(model)
    grads(model, LARGE)
    grads(model, LARGE)
    (line,) = lines()
    after = plan_of(model)
    for part in (
        f"Stack is called with [{LARGE}, 16], larger than [{SMALL}, 16]",
        "planned again",
        f"peaked at {runtime.format_bytes(before.measured_peak or 0)}",
        f"will at {runtime.format_bytes(after.measured_peak or 0)} now",
    ):
        assert part in line


def test_the_larger_plan_is_for_smaller_calls_after(lines: Lines) -> None:
    model = fitted()
    grads(model, LARGE)
    plan = plan_of(model)
    assert same(grads(model, SMALL), plain(model, SMALL))
    assert plan_of(model) is plan
    assert len(lines()) == 1


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


@pytest.mark.parametrize("how", ["evaluation", "no gradients"])
def test_what_does_not_train_is_not_planned_for(how: str, lines: Lines) -> None:
    model = fitted()
    plan = plan_of(model)
    model.train(how != "evaluation")
    with torch.set_grad_enabled(how != "no gradients"):
        model(inputs(LARGE))
    assert plan_of(model) is plan
    assert lines() == []


def test_a_larger_call_in_a_replay_is_not_planned_for(lines: Lines) -> None:
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
    assert lines() == []


def test_inside_a_region_it_is_said_rather_than_done(lines: Lines) -> None:
    model = fitted(drop=0.0)
    x = inputs(LARGE)
    rekindle.checkpoint(model, x).square().mean().backward()
    found = [p.grad for p in model.parameters()]
    assert same(found, plain(model, LARGE))
    (line,) = lines()
    assert "not planned again: it is called inside a region" in line


def test_where_an_optimizer_steps_in_backward_it_is_said_rather_than_done(lines: Lines) -> None:
    model = fitted()
    model.blocks[0].norm.weight.register_post_accumulate_grad_hook(lambda _: None)
    grads(model, LARGE)
    (line,) = lines()
    assert "not planned again: a parameter has a hook" in line


def test_a_plan_that_was_applied_says_once_that_it_is_for_less(lines: Lines) -> None:
    model = Stack(4, 16, 0.1)
    plan = rekindle.solve(rekindle.profile(model, inputs(SMALL)), "60%")
    rekindle.apply(model, plan)
    grads(model, SMALL)
    assert lines() == []
    assert same(grads(model, LARGE, 2 * LARGE), plain(model, LARGE, 2 * LARGE))
    (line,) = lines()
    assert f"Stack is called with [{LARGE}, 16], larger than [{SMALL}, 16]" in line
    assert "the plan was applied, not fitted" in line
    assert rekindle.plan_of(model) is plan


def test_a_plan_that_knows_no_shapes_says_nothing(lines: Lines) -> None:
    model = fitted()
    rekindle.apply(model, replace(plan_of(model), inputs=()))
    grads(model, LARGE)
    assert lines() == []


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


def test_a_function_is_compared_by_what_the_model_was_called_with(lines: Lines) -> None:
    torch.manual_seed(0)
    model, small = Stack(4, 16), inputs(SMALL)
    rekindle.fit(model, lambda: model(small).square().mean(), "60%")
    assert plan_of(model).inputs == ((SMALL, 16),)
    grads(model, SMALL)
    assert lines() == []
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


def test_single_numbers_among_the_arguments_do_not_count(lines: Lines) -> None:
    class Scaled(Stack):
        def forward(self, x: Tensor, run: Any = None, by: Any = 1) -> Tensor:
            return super().forward(x) * by

    model = Scaled(4, 16)
    rekindle.fit(model, inputs(SMALL), "60%")
    model(inputs(SMALL), by=torch.tensor(2.0)).sum().backward()
    assert lines() == []


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
    monkeypatch.setattr("rekindle.planner.fit.profile_model", lambda *_: profile)
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


def test_remove_takes_all_of_it_off(lines: Lines) -> None:
    model = Stack(4, 16)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    rekindle.fit(model, inputs(SMALL), "60%")
    rekindle.remove(model)
    assert rekindle.plan_of(model) is None
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    grads(model, LARGE)
    assert lines() == []


def test_other_fates_take_the_place_of_a_plan() -> None:
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


def test_a_compiled_model_has_no_break_from_it() -> None:
    model = fitted(budget="1GiB", drop=0.0)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(inputs(LARGE)), model(inputs(LARGE)))


def test_ranks_do_not_plan_again(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fitted()
    monkeypatch.setattr(runtime, "has_other_ranks", lambda: True)
    grads(model, LARGE)
    (line,) = lines()
    assert "ranks would have to agree on when" in line


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
