"""Candidates that go op by op are as fast as some of them were in a whole step."""

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
from rekindle.planner.types import BlockProfile, BlockSpans, Candidate, Profile
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


ORDER = [path for path, _ in profile_of().order]


def spans_of(forward: float, backward: float, host: float = 0.0) -> BlockSpans:
    return BlockSpans((forward,) * 4, (backward,) * 4, (host,) * 4, (host,) * 4)


def calibrated(spans: BlockSpans, model: nn.Module, block: BlockProfile = BLOCK) -> BlockProfile:
    profile = profile_of(block)
    (found,) = calibrate_to_whole_step(model, profile, ORDER, lambda: spans).blocks
    return found


def test_op_by_op_times_are_scaled_to_those_of_the_step() -> None:
    found = calibrated(spans_of(1.5, 5.0), Stack(4))
    assert found.candidates[:2] == (KEEP, DROP)
    assert [each.forward_seconds for each in found.candidates[2:]] == [1.5, 1.5, 1.5]
    assert [each.backward_seconds for each in found.candidates[2:]] == [4.5, 5.0, 5.0]


def test_a_step_in_which_blocks_took_as_long_as_alone_changes_nothing() -> None:
    assert calibrated(spans_of(1.0, 2.5), Stack(4)) == BLOCK


def test_no_candidate_becomes_faster_than_the_plain_block() -> None:
    found = calibrated(spans_of(0.5, 1.0), Stack(4))
    assert all(each.forward_seconds == 1.0 for each in found.candidates)
    assert min(each.backward_seconds for each in found.candidates) == 2.0


def test_a_host_that_is_faster_in_the_step_is_faster_in_the_profile() -> None:
    slow = replace(FEW, forward_host_seconds=0.8, backward_host_seconds=0.8)
    block = BlockProfile("Block", "Block", (KEEP, DROP, slow))
    found = calibrated(spans_of(1.0, 2.5, host=0.2), Stack(4), block).candidates[2]
    assert found.forward_host_seconds == pytest.approx(0.2, rel=0.2)
    assert found.backward_host_seconds == pytest.approx(0.2, rel=0.2)


def test_the_step_runs_by_the_candidate_that_holds_least_and_moves_nothing() -> None:
    model, seen = Stack(4), []

    def step() -> BlockSpans:
        seen.extend(forward_of(block) for block in model.blocks)
        return spans_of(1.0, 2.5)

    calibrate_to_whole_step(model, profile_of(), ORDER, step)
    assert [forward.policy.by_number.keys() for forward in seen] == [{0}] * 4  # type: ignore[union-attr]
    assert all(forward_of(block) is None for block in model.blocks)


def test_the_step_peaks_no_higher_than_one_with_every_block_recomputed() -> None:
    model, seen = Stack(4), []

    def step() -> BlockSpans:
        seen.extend(forward_of(block) for block in model.blocks)
        return spans_of(1.0, 2.5)

    lean = replace(DROP, backward_peak=60)
    profile = profile_of(BlockProfile("Block", "Block", (KEEP, lean, FEW)))
    calibrate_to_whole_step(model, profile, ORDER, step)
    run = [lean if forward.strategy == Recompute() else FEW for forward in seen]
    assert run == [lean, FEW, FEW, FEW]
    limit = (1 + SLACK) * simulate(profile, [lean] * 4).peak
    assert simulate(profile, run).peak <= limit < simulate(profile, [FEW] * 4).peak


def test_blocks_that_were_recomputed_in_the_step_do_not_count() -> None:
    lean = replace(DROP, backward_peak=60)
    profile = profile_of(BlockProfile("Block", "Block", (KEEP, lean, FEW)))
    spans = BlockSpans((9.0, 1.0, 1.0, 1.0), (9.0, 2.5, 2.5, 2.5))
    assert calibrate_to_whole_step(Stack(4), profile, ORDER, lambda: spans) == profile


def refuse() -> BlockSpans:
    raise AssertionError("there is no room for a block op by op")


def test_a_step_that_was_measured_says_how_high_it_may_peak() -> None:
    profile = replace(profile_of(), recompute_peak=50)
    assert calibrate_to_whole_step(Stack(4), profile, ORDER, refuse) == profile


def test_a_step_that_does_not_fit_changes_nothing() -> None:
    def step() -> BlockSpans:
        raise torch.OutOfMemoryError("no room")

    model = Stack(4)
    assert calibrate_to_whole_step(model, profile_of(), ORDER, step) == profile_of()
    assert all(forward_of(block) is None for block in model.blocks)


def test_blocks_without_such_candidates_are_left_alone() -> None:
    block = BlockProfile("Block", "Block", (KEEP, DROP))
    assert calibrate_to_whole_step(Stack(4), profile_of(block), ORDER, refuse) == profile_of(block)


def test_a_profile_is_calibrated_where_host_and_device_work_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        planning,
        "measuring_device",
        lambda device, _: replace(profile_model.measuring_device(device), host_runs_ahead=True),
    )
    timed: list[BlockSpans] = []
    monkeypatch.setattr(
        profile_model,
        "calibrate_to_whole_step",
        lambda model, profile, order, time_blocks: timed.append(time_blocks()) or profile,
    )
    rekindle.profile(Stack(3, 16), torch.randn(64, 16))
    assert len(timed) == 1
    assert len(timed[0].forward) == 3
    assert min(timed[0].forward) > 0
