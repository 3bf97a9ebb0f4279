"""The source of a fake profile's times: a device, or a measured profile."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle.planner.devices import DEVICES
from rekindle.planner.plan_for_budget import plain_prediction
from rekindle.strategy import Keep, Recompute
from tests.planner.cases import unchanged
from tests.planner.fake_cases import that_learns
from tests.toys import Stack

pytest.importorskip("scipy")


def test_a_replay_takes_as_long_as_the_ops_that_run_again() -> None:
    x = torch.randn(64, 16, requires_grad=True)
    found = rekindle.profile(Stack(3, 16), x, device="meta", like="cpu").blocks[0].candidates
    keep = next(option for option in found if option.strategy == Keep())
    again = next(option for option in found if option.strategy == Recompute())
    assert keep.forward_seconds == again.forward_seconds
    least = DEVICES["cpu"].launch
    assert again.backward_seconds - keep.backward_seconds > 3 * least
    # But for the residual's sum and the last product, which nobody needs again.
    assert again.backward_seconds - keep.backward_seconds <= keep.forward_seconds


@pytest.mark.usefixtures("few_sets")
def test_on_a_faster_device_a_step_takes_less() -> None:
    model = Stack(3, 16).to(torch.bfloat16)
    big = torch.empty(2**16, 16, dtype=torch.bfloat16, device="meta")
    seconds = [
        plain_prediction(rekindle.profile(model, big, device="meta", like=name)).seconds
        for name in ("T4", "A100-40GB", "A100-80GB", "H200")
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 4


def test_a_device_with_a_link_has_candidates_that_offload() -> None:
    model, batch = that_learns()
    profile = rekindle.profile(model, batch, device="meta", like="H100")
    assert profile.bytes_per_second == 64e9 * 0.85
    moved = [option for option in profile.blocks[0].candidates if option.tier]
    assert moved
    assert all(option.bytes_moved > 0 for option in moved)


def test_a_device_without_a_link_has_none() -> None:
    model, batch = that_learns()
    profile = rekindle.profile(model, batch, device="meta", like="cpu")
    assert profile.bytes_per_second == 0.0
    assert not any(option.tier for option in profile.blocks[0].candidates)


def test_a_device_may_be_described() -> None:
    mine = replace(DEVICES["T4"], name="mine", memory=1e6)
    model, batch = that_learns()
    profile = rekindle.profile(model, batch, device="meta", like=mine)
    assert profile.device == "mine"
    assert profile.blocks[0].candidates[0].seconds > 0.01


def measured_elsewhere(model: nn.Module, batch: Any) -> rekindle.Profile:
    """A measured profile, as it might have been on a device with a link."""
    measured = rekindle.profile(model, batch)
    return replace(measured, device="NVIDIA H200", bytes_per_second=5e10, rest_seconds=0.25)


def test_a_measured_profile_gives_its_blocks_and_times() -> None:
    model, batch = that_learns()
    like = measured_elsewhere(model, batch)
    found = rekindle.profile(model.to("meta"), batch, device="meta", like=like)
    assert [block.candidates for block in found.blocks] == [
        block.candidates for block in like.blocks
    ]
    assert (found.device, found.bytes_per_second, found.rest_seconds) == ("NVIDIA H200", 5e10, 0.25)
    assert (found.order, found.static_bytes, found.rest_peak) == (
        like.order,
        like.static_bytes,
        like.rest_peak,
    )


def test_a_measured_profile_does_for_more_layers_and_for_an_optimizer() -> None:
    model, batch = that_learns()
    like = measured_elsewhere(model, batch)
    larger = Stack(30, 16, 0.1).to("meta")
    found = rekindle.profile(
        larger, batch, device="meta", like=like, optimizer=torch.optim.Adam(larger.parameters())
    )
    assert len(found.order) == 30
    weights = sum(p.nbytes for p in larger.parameters())
    assert found.static_bytes == 4 * weights + batch.nbytes


def test_a_measured_profile_of_other_blocks_is_refused_with_both() -> None:
    model, batch = that_learns()
    like = measured_elsewhere(model, batch)
    other = Stack(3, 16, 0.1)
    other.blocks[1].mlp.up.bias = None
    with unchanged(other), pytest.raises(ValueError, match=r"'blocks\.1' is not among those"):
        rekindle.profile(other, batch, device="meta", like=like)


def test_a_measured_profile_of_another_batch_or_class_is_refused() -> None:
    model, batch = that_learns()
    like = measured_elsewhere(model, batch)
    with pytest.raises(ValueError, match=r"batch of float32\[64, 16\] that learns.*\[32, 16\]"):
        rekindle.profile(model, batch[:32].detach(), device="meta", like=like)
    with pytest.raises(ValueError, match="profile is of a Stack, but the model is a Sequential"):
        rekindle.profile(nn.Sequential(model), batch, device="meta", like=like)


def test_what_times_are_taken_must_be_said_for_a_model_on_the_meta_device() -> None:
    model = Stack(2, 16).to("meta")
    with pytest.raises(ValueError, match=r"like= says which device.*'H200'"):
        rekindle.profile(model, torch.randn(4, 16), device="meta")


def test_a_model_on_a_device_of_the_table_is_profiled_as_on_that() -> None:
    model, batch = that_learns()
    assert rekindle.profile(model, batch, device="meta").device == "cpu"


def test_other_devices_and_kinds_of_likeness_are_refused() -> None:
    model, batch = that_learns()
    with pytest.raises(ValueError, match='device should be "meta"'):
        rekindle.profile(model, batch, device="cuda")
    with pytest.raises(ValueError, match='like= is for device="meta"'):
        rekindle.profile(model, batch, like="H200")
    with pytest.raises(TypeError, match="name of a device or a profile, but got int"):
        rekindle.profile(model, batch, device="meta", like=200)  # type: ignore[arg-type]
