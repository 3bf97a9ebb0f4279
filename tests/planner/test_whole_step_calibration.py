"""The extra time of a whole step over its blocks alone is added to candidates op by op."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import rekindle
from rekindle._api import planning
from rekindle.modules.forward import forward_of
from rekindle.planner import profile_model
from rekindle.planner.measure.whole_step_calibration import SLACK, calibrate_to_whole_step
from rekindle.planner.timeline import simulate
from rekindle.planner.types import BlockProfile, Candidate, Profile
from rekindle.strategy import Keep, NumberedOps, Recompute, Selective
from tests.toys import Stack

pytest.importorskip("scipy")

KEEP = Candidate(Keep(), bytes_held=100, forward_seconds=1.0, backward_seconds=2.0)
DROP = Candidate(Recompute(), 1, 0, 1.0, 3.0, backward_peak=100)
MANY = Candidate(Selective(NumberedOps((0, 1))), 50, 0, 1.0, 2.25)
FEW = Candidate(Selective(NumberedOps((0,))), 20, 0, 1.0, 2.5)
AWAY = Candidate(Selective(NumberedOps(offloaded=(0,))), 5, 15, 1.0, 2.5)
BLOCK = BlockProfile("Block", "Block", (KEEP, DROP, MANY, FEW, AWAY))


def profile_of(block: BlockProfile = BLOCK) -> Profile:
    order = tuple((f"blocks.{i}", 0) for i in range(4))
    return Profile("Stack", "none", "", 0, 0, 0, 0.5, 0.0, (block,), order)


def together(seconds: float, model: nn.Module) -> BlockProfile:
    (found,) = calibrate_to_whole_step(model, profile_of(), lambda: seconds).blocks
    return found


def test_what_a_step_takes_longer_is_shared_by_its_blocks() -> None:
    alone = 0.5 + 4 * FEW.seconds
    found = together(alone + 2.0, Stack(4))
    assert [option.seconds for option in found.candidates] == [3.0, 4.0, 3.75, 4.0, 4.0]


def test_a_step_that_takes_no_longer_changes_nothing() -> None:
    assert together(0.5 + 4 * FEW.seconds - 1.0, Stack(4)) == BLOCK


def test_the_step_runs_by_the_candidate_that_holds_least_and_moves_nothing() -> None:
    model, seen = Stack(4), []

    def step() -> float:
        seen.extend(forward_of(block) for block in model.blocks)
        return 0.0

    calibrate_to_whole_step(model, profile_of(), step)
    assert [forward.policy.by_number.keys() for forward in seen] == [{0}] * 4  # type: ignore[union-attr]
    assert all(forward_of(block) is None for block in model.blocks)


def test_the_step_peaks_no_higher_than_one_with_every_block_recomputed() -> None:
    model, seen = Stack(4), []

    def step() -> float:
        seen.extend(forward_of(block) for block in model.blocks)
        return 0.0

    lean = replace(DROP, backward_peak=60)
    profile = profile_of(BlockProfile("Block", "Block", (KEEP, lean, FEW)))
    calibrate_to_whole_step(model, profile, step)
    run = [lean if forward.strategy == Recompute() else FEW for forward in seen]
    assert run == [lean, FEW, FEW, FEW]
    limit = (1 + SLACK) * simulate(profile, [lean] * 4).peak
    assert simulate(profile, run).peak <= limit < simulate(profile, [FEW] * 4).peak


def test_a_step_that_was_measured_says_how_high_it_may_peak() -> None:
    profile = replace(profile_of(), recompute_peak=50)
    assert calibrate_to_whole_step(Stack(4), profile, lambda: 100.0) == profile


def test_too_few_blocks_to_tell_from_noise_are_not_run() -> None:
    profile = profile_of(
        BlockProfile("Block", "Block", (KEEP, replace(DROP, backward_peak=0), FEW))
    )
    assert calibrate_to_whole_step(Stack(4), profile, lambda: 100.0) == profile


def test_a_step_that_does_not_fit_changes_nothing() -> None:
    def step() -> float:
        raise torch.OutOfMemoryError("no room")

    model = Stack(4)
    assert calibrate_to_whole_step(model, profile_of(), step) == profile_of()
    assert all(forward_of(block) is None for block in model.blocks)


def test_blocks_without_such_candidates_are_left_alone() -> None:
    block = BlockProfile("Block", "Block", (KEEP, DROP))
    assert calibrate_to_whole_step(Stack(4), profile_of(block), lambda: 100.0) == profile_of(block)


def test_a_profile_is_calibrated_where_host_and_device_work_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        planning,
        "measuring_device",
        lambda device, _: replace(profile_model.measuring_device(device), host_runs_ahead=True),
    )
    timed: list[float] = []
    monkeypatch.setattr(
        profile_model,
        "calibrate_to_whole_step",
        lambda model, profile, time_step: timed.append(time_step()) or profile,
    )
    rekindle.profile(Stack(3, 16), torch.randn(64, 16))
    assert len(timed) == 1
    assert timed[0] > 0
