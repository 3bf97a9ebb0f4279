"""Blocks take as long as they did in a step; what is missing to the step's time is outside them."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

import rekindle
from rekindle.planner.candidates import recomputing_all
from rekindle.planner.devices import DEVICES, OpClock
from rekindle.planner.measure.block_benchmark import _ones_later
from rekindle.planner.measure.step_calibration import calibrate_to_recomputing, with_step_time
from rekindle.planner.timeline import Timeline, simulate
from rekindle.planner.trace.block_spans import time_with_spans
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import BlockProfile, BlockSpans, Candidate, Profile
from rekindle.strategy import Keep, Recompute
from tests.toys import Stack

KEEP = Candidate(Keep(), 100, 0, 1.0, 2.0)
DROP = Candidate(Recompute(), 1, 0, 1.0, 3.0)
ON_A_HOST = replace(DROP, forward_host_seconds=0.5, backward_host_seconds=4.0)


def profile_of(*drops: Candidate, order: tuple[int, ...] = (0, 0)) -> Profile:
    blocks = tuple(BlockProfile(f"Block{i}", "", (KEEP, drop)) for i, drop in enumerate(drops))
    places = tuple((f"blocks.{i}", index) for i, index in enumerate(order))
    return Profile("Toy", "none", "", 0, 0, 0, 0.0, 0.0, blocks, places)


def paths(profile: Profile) -> list[str]:
    return [path for path, _ in profile.order]


def test_all_candidates_of_a_block_are_scaled_by_what_one_took_in_a_step() -> None:
    profile = profile_of(DROP)
    spans = BlockSpans((2.0, 2.0), (1.5, 1.5))
    (found,) = calibrate_to_recomputing(profile, paths(profile), spans).blocks
    assert [each.forward_seconds for each in found.candidates] == [2.0, 2.0]
    assert [each.backward_seconds for each in found.candidates] == [1.0, 1.5]


def test_distinct_blocks_have_factors_of_their_own() -> None:
    profile = profile_of(DROP, DROP, order=(0, 1, 1))
    spans = BlockSpans((1.0, 2.0, 2.0), (3.0, 3.0, 6.0))
    found = calibrate_to_recomputing(profile, paths(profile), spans)
    assert simulate(found, recomputing_all(found)).seconds == pytest.approx(1 + 4 + 3 + 9)
    assert found.blocks[0] == profile.blocks[0]


def test_a_block_that_waits_for_the_host_in_a_step_waits_for_it_in_the_profile() -> None:
    profile = profile_of(ON_A_HOST)
    spans = BlockSpans((1.0, 1.0), (2.0, 2.0))  # of the host's 4.0
    found = calibrate_to_recomputing(profile, paths(profile), spans)
    assert sum(Timeline(found).spans(Timeline(found).terms_of(recomputing_all(found)))[1]) < 4.1
    assert found.blocks[0].candidates[1].backward_host_seconds < 2.1


def test_a_host_that_was_faster_in_a_step_is_faster_in_the_profile() -> None:
    profile = profile_of(ON_A_HOST)
    late = 0.125  # the device waits for the first half of the first launch
    spans = BlockSpans((1.0 + late, 1.0), (3.0, 3.0), (0.25, 0.25), (2.0, 2.0))
    found = calibrate_to_recomputing(profile, paths(profile), spans).blocks[0].candidates[1]
    assert (found.forward_host_seconds, found.backward_host_seconds) == (0.25, 2.0)
    assert (found.forward_seconds, found.backward_seconds) == (1.0, 3.0)


def test_a_host_that_waited_for_the_device_in_a_step_is_as_fast_as_it_was_alone() -> None:
    profile = profile_of(replace(ON_A_HOST, backward_host_seconds=0.5))
    late = 0.25  # as above
    spans = BlockSpans((1.0 + late, 1.0), (3.0, 3.0), (1.0, 1.0), (3.0, 3.0))
    found = calibrate_to_recomputing(profile, paths(profile), spans)
    assert found.blocks == profile.blocks


def test_a_host_that_launches_what_is_outside_does_not_run_ahead_meanwhile() -> None:
    profile = with_step_time(replace(profile_of(ON_A_HOST), rest_host_seconds=3.0), 15.0)
    keep = [profile.candidates(i)[0] for i in range(2)]
    fast = with_step_time(profile_of(ON_A_HOST), 15.0)
    assert simulate(profile, keep).seconds > simulate(fast, keep).seconds - 3.0
    assert simulate(profile, recomputing_all(profile)).seconds == pytest.approx(15.0)


def test_a_step_that_was_held_up_is_not_believed() -> None:
    profile = profile_of(DROP)
    spans = BlockSpans((100.0, 100.0), (3.0, 3.0))
    (found,) = calibrate_to_recomputing(profile, paths(profile), spans).blocks
    assert found.candidates[0].forward_seconds == 3.0


def test_a_block_that_was_held_up_when_it_ran_alone_is_as_fast_as_in_the_step() -> None:
    profile = profile_of(replace(DROP, backward_seconds=300.0))
    spans = BlockSpans((1.0, 1.0), (3.0, 3.0))
    (found,) = calibrate_to_recomputing(profile, paths(profile), spans).blocks
    assert found.candidates[1].backward_seconds == pytest.approx(3.0)


def test_blocks_that_another_rank_alone_ran_are_left_as_they_are() -> None:
    profile = profile_of(DROP, DROP, order=(0, 1))
    found = calibrate_to_recomputing(profile, ["blocks.1"], BlockSpans((2.0,), (6.0,)))
    assert found.blocks[0] == profile.blocks[0]
    assert found.blocks[1].candidates[1].forward_seconds == 2.0


def test_a_step_takes_what_it_was_measured_to_take_although_the_host_runs_ahead_outside() -> None:
    profile = profile_of(ON_A_HOST)
    missing = 12.0 - simulate(profile, recomputing_all(profile)).seconds
    found = with_step_time(profile, 12.0)
    assert simulate(found, recomputing_all(found)).seconds == pytest.approx(12.0)
    assert found.rest_seconds > missing  # some of it passes while blocks would wait for the host


def test_a_step_that_takes_no_longer_than_its_blocks_has_no_time_outside() -> None:
    assert with_step_time(profile_of(DROP), 1.0).rest_seconds == 0.0


def test_the_spans_of_a_step_are_the_times_of_its_blocks() -> None:
    model = Stack(3, 16)
    x = torch.randn(32, 16)
    blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    rekindle.apply(model, "recompute")
    with OpClock(DEVICES["cpu"]) as clock:
        seconds, spans = time_with_spans(TrainingStep(model, x), blocks, clock)
    assert len(set(spans.forward)) == 1
    assert len(spans.forward) == len(spans.backward) == 3
    assert spans.backward[0] > 2 * spans.forward[0]  # a replay, and a backward
    assert sum(spans.forward) + sum(spans.backward) <= seconds
    rekindle.remove(model)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)


class Fails(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"not for {list(x.shape)}")


class GoesOnWithout(torch.nn.Module):
    """Catches the error of its second block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), Fails(), torch.nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        with suppress(RuntimeError):
            x = self.blocks[1](x)
        out: torch.Tensor = self.blocks[2](x)
        return out


def test_a_block_that_fails_and_is_caught_takes_no_time() -> None:
    model, x = GoesOnWithout(), torch.randn(32, 4)
    blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    with OpClock(DEVICES["cpu"]) as clock:
        _, spans = time_with_spans(TrainingStep(model, x), blocks, clock)
    assert spans.forward[0] == spans.forward[2] > spans.forward[1] == 0.0


def test_the_gradient_of_a_block_that_runs_alone_is_laid_out_as_its_output() -> None:
    images = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert _ones_later(images)().stride() == images.stride()
    assert _ones_later(images[:, :2])().is_contiguous()  # which is a part of its memory
