"""A model that fits without a plan gets none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.module_attachment import attached
from rekindle.modules.forward import forward_of
from rekindle.planner import verified_plan
from rekindle.planner.instruments import timing
from rekindle.planner.measure.measure_step import MeasuredStep
from rekindle.strategy import Keep
from tests.planner.cases import unchanged
from tests.toys import Block, Stack, same_bits

pytest.importorskip("scipy")


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


def state_of(model: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    """All attributes of the modules inside a model, hooks included."""
    return [
        (path, {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()})
        for path, module in model.named_modules()
        if path
    ]


@pytest.mark.parametrize("budget", ["1GiB", "200%", "100%"])
def test_a_model_that_fits_without_a_plan_gets_none(budget: str) -> None:
    model, x = Stack(4, 16, 0.1), torch.randn(256, 16)
    before = state_of(model)
    plan = rekindle.fit(model, x, budget, loss=mean)
    assert state_of(model) == before
    assert all(forward_of(module) is None for module in model.modules())
    assert plan.keeps_all
    assert {option.strategy for _, _, option in plan.blocks} == {Keep()}
    assert rekindle.plan_of(model) is plan
    with rekindle.observe() as seen:
        mean(model(x)).backward()
    assert (seen.total.forwards, seen.total.replays) == (0, 0)


def test_it_is_said_that_it_fits_as_it_is() -> None:
    model, x = Stack(4, 16), torch.randn(256, 16)
    plan = rekindle.fit(model, x, "1GiB", loss=mean)
    title, *lines = str(plan).splitlines()
    assert title == "Plan for Stack within 1 GiB: fits as it is"
    assert "without a plan" not in "".join(lines)
    tight = rekindle.fit(model, x, "60%", loss=mean)
    assert "fits as it is" not in str(tight)


def test_its_peak_and_time_are_measured_and_are_those_without_a_plan() -> None:
    model, x = Stack(4, 16), torch.randn(256, 16)
    plan = rekindle.fit(model, x, "1GiB", loss=mean)
    assert plan.measured_peak is not None
    assert plan.measured_time is not None
    assert (plan.plain_peak, plan.plain_time) == (plan.measured_peak, plan.measured_time)
    assert plan.verified is None  # there is nothing to compare with


def test_nothing_is_solved_and_five_steps_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One to warm up, one to meter, and three to time, of which no two took the same."""
    monkeypatch.setattr(timing, "_ALIKE", -1.0)
    model, x = Stack(4, 16), torch.randn(256, 16)
    profile = rekindle.profile(model, x, loss=mean)
    monkeypatch.setattr(verified_plan, "solved", None)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    rekindle.fit(model, x, "1GiB", loss=mean, profile=profile)
    assert len(calls) == 5


def test_to_apply_such_a_plan_changes_no_block(tmp_path: Path) -> None:
    model, x = Stack(4, 16), torch.randn(256, 16)
    plan = rekindle.fit(model, x, "1GiB", loss=mean)
    plan.save(tmp_path / "plan.json")
    for each in (
        rekindle.Plan.load(tmp_path / "plan.json"),
        rekindle.solve(rekindle.profile(model, x, loss=mean), "1GiB"),
    ):
        other = Stack(4, 16)
        before = state_of(other)
        with unchanged(other):
            rekindle.apply(other, each)
            assert state_of(other) == before
            assert rekindle.plan_of(other) is each
            rekindle.remove(other)


def test_a_larger_call_is_planned_for() -> None:
    torch.manual_seed(0)
    model, small, large = Stack(4, 16, 0.1), torch.randn(64, 16), torch.randn(512, 16)
    profile = rekindle.profile(model, large, loss=mean)
    least, plain = (rekindle.frontier(profile, 2)[i].peak for i in (-1, 0))
    torch.manual_seed(1)
    mean(model(large)).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    assert rekindle.fit(model, small, (least + plain) // 2, loss=mean).keeps_all
    torch.manual_seed(1)
    mean(model(large)).backward()
    plan = rekindle.plan_of(model)
    assert plan is not None
    assert not plan.keeps_all
    assert plan.inputs == ((512, 16),)
    assert any(forward_of(block) is not None for block in model.blocks)
    assert all(map(same_bits, expected, [p.grad for p in model.parameters()]))
    rekindle.remove(model)
    assert all(attached(module) is None for module in model.modules())


def test_a_plan_is_made_where_the_step_takes_more_than_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what was measured without a plan is what the plan is compared with."""
    model, x = Stack(6, 16), torch.randn(256, 16)
    profile = rekindle.profile(model, x, loss=mean)
    measure_step, limit = verified_plan.measure_step, rekindle.solve(profile, "100%").budget

    def more(step: Any, plan: rekindle.Plan, measured: Any, **how: Any) -> MeasuredStep:
        if plan.keeps_all:
            return MeasuredStep(limit + 1000, 7.0)
        return measure_step(step, plan, measured, **how)

    monkeypatch.setattr(verified_plan, "measure_step", more)
    plan = rekindle.fit(model, x, limit, loss=mean, profile=profile)
    assert not plan.keeps_all
    assert (plan.plain_peak, plan.plain_time) == (limit + 1000, 7.0)
    assert "(without a plan " in str(plan)


def test_a_model_that_is_one_block_is_planned_again_too() -> None:
    model, small, large = Block(16), torch.randn(64, 16), torch.randn(512, 16)
    profile = rekindle.profile(model, large, loss=mean)
    least, plain = (rekindle.frontier(profile, 2)[i].peak for i in (-1, 0))
    assert rekindle.fit(model, small, (least + plain) // 2, loss=mean).keeps_all
    mean(model(large)).backward()
    plan = rekindle.plan_of(model)
    assert plan is not None
    assert plan.inputs == ((512, 16),)
    assert not plan.keeps_all


def test_layers_that_take_a_cache_have_no_hooks_of_ours() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    model = transformers.LlamaForCausalLM(config).train()
    tokens = torch.randint(64, (2, 16))
    before = {path: len(m._forward_pre_hooks) for path, m in model.named_modules()}
    rekindle.fit(model, {"input_ids": tokens, "labels": tokens}, "1GiB")
    hooked = [
        path for path, m in model.named_modules() if len(m._forward_pre_hooks) != before[path]
    ]
    assert hooked == ["", "model"]  # which keep no cache while they train, as they were measured
    assert model(tokens).past_key_values is None
    rekindle.remove(model)
    assert {path: len(m._forward_pre_hooks) for path, m in model.named_modules()} == before
