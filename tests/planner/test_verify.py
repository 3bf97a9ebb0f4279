"""`fit` compares the gradients of a plan with those of a step by other means."""

import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.offload.device_offloader import DeviceOffloader
from rekindle.planner import plan_for_budget, verified_plan, verify
from rekindle.planner.gradient_fingerprints import GradientFingerprints
from rekindle.planner.instruments import timing
from rekindle.planner.timeline import simulate
from rekindle.planner.verify import BIT_FOR_BIT, reference_for
from rekindle.strategy import Keep, Recompute
from tests.planner.cases import unchanged
from tests.toys import Block, Mlp, Stack
from tests.wrong import wrong_recompute

pytest.importorskip("scipy")


def mean(out: Tensor) -> Tensor:
    return out.square().mean()


class Normed(nn.Module):
    """A block with dropout and batch norm."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)
        self.mlp = Mlp(dim, 4 * dim, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x))
        return out


@contextmanager
def counted(model: nn.Module) -> Iterator[list[int]]:
    """The calls of a model."""
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    yield calls
    handle.remove()


def test_dropout_and_batch_norm_under_a_plan_are_verified_bit_for_bit() -> None:
    model, x = nn.Sequential(*(Normed() for _ in range(4))), torch.randn(256, 16)
    plan = rekindle.fit(model, x, "60%", loss=mean)
    assert any(option.strategy != Keep() for _, _, option in plan.blocks)
    found = r"gradients bit for bit, with [1-4] of 4 blocks run another way"
    assert re.fullmatch(found, plan.verified or "")
    assert f"  verified        {plan.verified}" in str(plan).splitlines()


def test_what_was_verified_is_saved_with_the_plan(tmp_path: Path) -> None:
    plan = rekindle.fit(Stack(4, 16), torch.randn(256, 16), "60%", loss=mean)
    plan.save(tmp_path / "plan.json")
    assert rekindle.Plan.load(tmp_path / "plan.json") == plan
    assert (plan.verified or "").startswith(BIT_FOR_BIT)


@pytest.mark.parametrize("verify", ["auto", "gradients"])
def test_to_compare_gradients_takes_one_more_step(
    verify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Stack(4, 16, 0.1), torch.randn(256, 16)
    profile = rekindle.profile(model, x, loss=mean)
    monkeypatch.setattr(
        verified_plan, "_NOISE_SECONDS", float("inf")
    )  # no step is late, however slow
    monkeypatch.setattr(timing, "_ALIKE", -1.0)  # no two runs take the same time
    taken = []
    for what in ("peak", verify):
        with counted(model) as calls:
            plan = rekindle.fit(model, x, "60%", loss=mean, profile=profile, verify=what)
        taken.append(len(calls))
        rekindle.remove(model)
    assert taken == [5, 6]
    assert (plan.verified or "").startswith(BIT_FOR_BIT)


def test_with_the_peak_alone_nothing_is_compared() -> None:
    plan = rekindle.fit(Stack(4, 16), torch.randn(256, 16), "60%", loss=mean, verify="peak")
    assert plan.verified is None
    assert "verified" not in str(plan)


def test_by_default_a_step_of_a_minute_or_more_is_not_run_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Stack(4, 16), torch.randn(256, 16)
    profile = rekindle.profile(model, x, loss=mean)
    assert verified_plan.AFFORDABLE_SECONDS == 60
    monkeypatch.setattr(verified_plan, "AFFORDABLE_SECONDS", 0.0)
    assert rekindle.fit(model, x, "60%", loss=mean, profile=profile).verified is None
    asked = rekindle.fit(model, x, "60%", loss=mean, profile=profile, verify="gradients")
    assert (asked.verified or "").startswith(BIT_FOR_BIT)


@pytest.mark.parametrize("verify", ["gradient", None, True])
def test_another_verify_is_refused(verify: Any) -> None:
    with pytest.raises(ValueError, match='verify should be "auto", "gradients" or "peak"'):
        rekindle.fit(Stack(2), torch.randn(4, 8), "60%", verify=verify)


@pytest.fixture
def recompute_is_wrong() -> Iterator[None]:
    with wrong_recompute():
        yield


def test_a_plan_with_wrong_gradients_is_refused_and_leaves_the_model_as_it_was(
    recompute_is_wrong: None,
) -> None:
    model, x = nn.Sequential(*(Normed() for _ in range(4))), torch.randn(256, 16)
    model(x).mean().backward()
    rekindle.apply(model, {"2": "recompute"})
    match = r"other gradients than the same step without it(.|\n)*off by 0\.0\d+ of its norm"
    with unchanged(model), pytest.raises(rekindle.RekindleError, match=match) as refused:
        rekindle.fit(model, x, "60%", loss=mean)
    assert "bug in rekindle" in str(refused.value)
    assert any(f"{i}.norm.weight ({i}: " in str(refused.value) for i in range(4))


def moving_model(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Tensor, rekindle.Profile]:
    """A model, a batch and their profile; as long as plans may spill, they spill all they can."""
    model, x = nn.Sequential(*(Block(64) for _ in range(8))), torch.randn(256, 64).requires_grad_()
    profile = rekindle.profile(model, x, loss=mean, spill=True)
    solved = plan_for_budget.solved

    def spilling(profile: rekindle.Profile, limit: int) -> rekindle.Plan:
        most = max(profile.blocks[0].candidates, key=lambda option: option.bytes_moved)
        if not most.bytes_moved:
            return solved(profile, limit)
        options = [most] * len(profile.order)
        return plan_for_budget.plan_by(profile, limit, options, simulate(profile, options), 0.0)

    monkeypatch.setattr(verified_plan, "solved", spilling)
    monkeypatch.setattr(
        verified_plan, "_NOISE_SECONDS", float("inf")
    )  # no step is late, however slow
    monkeypatch.setattr(verified_plan, "_OFFLOAD_GAIN", float("-inf"))  # and offload always pays
    return model, x, profile


def scaled(raw: Tensor) -> Tensor:
    """The bytes of an activation that is 3 % larger."""
    return (raw.view(torch.float32) * 1.03).view(torch.uint8)


@pytest.mark.parametrize("first_wrong_step", [1, 2, 4])
def test_offload_that_goes_wrong_in_a_later_step_is_not_trained_with(
    monkeypatch: pytest.MonkeyPatch, new_offloaders: None, first_wrong_step: int
) -> None:
    """Its plan gives way to one of whole blocks, and a warning names the parameters."""
    model, x, profile = moving_model(monkeypatch)
    given_back, steps = DeviceOffloader.load, []

    def wrong(self: DeviceOffloader, activation: Any) -> Tensor:
        value = given_back(self, activation)
        return scaled(value) if len(steps) > first_wrong_step else value

    monkeypatch.setattr(DeviceOffloader, "load", wrong)
    model.register_forward_pre_hook(lambda *_: steps.append(1))
    with pytest.warns(UserWarning, match="other gradients than the same step") as caught:
        plan = rekindle.fit(model, x, "90%", loss=mean, profile=profile)
    (warning,) = caught
    assert " spill " in str(warning.message)
    assert "A plan that keeps or recomputes whole blocks is applied" in str(warning.message)
    assert warning.filename == __file__
    assert {option.strategy for _, _, option in plan.blocks} == {Keep(), Recompute()}
    assert (plan.verified or "").startswith(BIT_FOR_BIT)


def test_wrong_offload_without_another_plan_that_fits_is_refused(
    monkeypatch: pytest.MonkeyPatch, new_offloaders: None
) -> None:
    model, x, profile = moving_model(monkeypatch)
    large = [
        replace(o, backward_peak=2**30) if o.strategy == Recompute() else o
        for o in profile.blocks[0].candidates
    ]
    profile = replace(profile, blocks=(replace(profile.blocks[0], candidates=tuple(large)),))
    given_back = DeviceOffloader.load
    monkeypatch.setattr(DeviceOffloader, "load", lambda self, what: scaled(given_back(self, what)))
    with unchanged(model), pytest.raises(rekindle.RekindleError, match="bug in rekindle"):
        rekindle.fit(model, x, "90%", loss=mean, profile=profile)


class Noisy(Block):
    """Draws from somewhere that no replay rewinds, in its backward."""

    noise = 1e-3
    """The noise's size, relative to each element of the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return _Noise.apply(super().forward(x), self)  # type: ignore[no-any-return, no-untyped-call]


class _Noise(torch.autograd.Function):
    """The gradient with noise, as of kernels that add up in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Noisy) -> Tensor:
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        seed = struct.unpack("q", os.urandom(8))[0]
        noise = torch.randn(grads[0].shape, generator=torch.Generator().manual_seed(seed))
        return grads[0] * (1 + ctx.block.noise * noise), None


def test_gradients_that_do_not_repeat_are_within_their_spread_and_no_error() -> None:
    model, x = nn.Sequential(*(Noisy(16) for _ in range(4)), Block(16)), torch.randn(256, 16)
    plan = rekindle.fit(model, x, "60%", loss=mean)
    count = sum(1 for name, _ in model.named_parameters() if not name.startswith("4."))
    found = f"gradients bit for bit but for {count} parameters, within the run-to-run spread"
    assert (plan.verified or "").startswith(found)


def test_noise_does_not_hide_gradients_that_are_wrong(recompute_is_wrong: None) -> None:
    model, x = nn.Sequential(*(Noisy(16) for _ in range(4)), Block(16)), torch.randn(256, 16)
    with pytest.raises(rekindle.RekindleError, match="other gradients"):
        rekindle.fit(model, x, "60%", loss=mean)


@pytest.fixture
def rarely_noisy(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model whose first block is noisy in each run, and its last but in those of the plan."""
    blocks = [Noisy(16) for _ in range(4)]
    for block, noise in zip(blocks, (1e-2, 0.0, 0.0, 1e-2), strict=True):
        block.noise = noise
    gradients = verify._gradients

    def without_the_last(*args: Any) -> GradientFingerprints:
        blocks[-1].noise = 0.0
        return gradients(*args)

    monkeypatch.setattr(verify, "_gradients", without_the_last)
    return nn.Sequential(*blocks)


def test_noise_that_no_run_of_the_reference_has_is_no_error_if_others_are_noisy(
    rarely_noisy: nn.Module,
) -> None:
    plan = rekindle.fit(rarely_noisy, torch.randn(256, 16), "60%", loss=mean)
    count = len(list(rarely_noisy.parameters()))
    found = f"gradients bit for bit but for {count} parameters, within the run-to-run spread"
    assert (plan.verified or "").startswith(found)


def test_gradients_that_are_doubled_are_refused_however_noisy_the_step_is(
    rarely_noisy: nn.Module,
) -> None:
    with (
        wrong_recompute(1.0),
        pytest.raises(rekindle.RekindleError, match="farther off than its runs are apart"),
    ):
        rekindle.fit(rarely_noisy, torch.randn(256, 16), "60%", loss=mean)


def test_the_gradients_of_a_head_outside_the_model_are_compared(
    recompute_is_wrong: None,
) -> None:
    """The batch learns too, and is the only one whose gradient is wrong."""
    model, x = nn.Sequential(Block(16), Block(16)), torch.randn(256, 16, requires_grad=True)
    model[0].requires_grad_(False)
    with pytest.raises(rekindle.RekindleError, match=r"a tensor of shape \[256, 16\] outside"):
        rekindle.fit(model, x, "80%", loss=mean)
    assert x.grad is None


def test_the_reference_runs_each_block_the_other_way_as_far_as_memory_allows() -> None:
    model, x = Stack(4, 16), torch.randn(256, 16)
    profile = rekindle.profile(model, x, loss=mean)
    plan = rekindle.solve(profile, "200%")
    blocks = [f"blocks.{i}" for i in range(4)]
    assert reference_for(plan, profile, plan.budget) == dict.fromkeys(blocks, Recompute())
    least = rekindle.frontier(profile, 2)[-1].plan
    assert reference_for(least, profile, plan.plain_peak) == {
        path: Recompute() if option.strategy == Keep() else Keep()
        for path, _, option in least.blocks
    }
    assert reference_for(least, profile, 0) == dict.fromkeys(blocks, Recompute())


def test_with_little_room_the_reference_keeps_a_block_of_each_kind() -> None:
    model = nn.Sequential(*(Block(16) for _ in range(3)), *(Mlp(16, 16) for _ in range(3)))
    profile = rekindle.profile(model, torch.randn(256, 16, requires_grad=True), loss=mean)
    options = [
        next(o for o in profile.candidates(i) if o.strategy == Recompute())
        for i in range(len(model))
    ]
    plan = plan_for_budget.plan_by(profile, 0, options, simulate(profile, options), 0.0)
    kept = [
        next(
            o
            for o in profile.candidates(i)
            if o.strategy == (Keep() if i in (0, 3) else Recompute())
        )
        for i in range(len(model))
    ]
    strategies = reference_for(plan, profile, simulate(profile, kept).peak)
    assert [path for path, strategy in strategies.items() if strategy == Keep()] == ["0", "3"]
