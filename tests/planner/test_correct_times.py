"""No plan is faster than no plan: times that cannot be are measured again, or raised."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import rekindle
from rekindle._api import planning
from rekindle.planner.instruments.timing import DeviceClock
from rekindle.planner.measure.correct_times import correct_times, with_plausible_hosts
from rekindle.planner.profile_model import measuring_device
from rekindle.planner.types import BlockProfile, Candidate, Profile
from rekindle.strategy import Keep, NumberedOps, Recompute, SavedIndices, Selective
from tests.toys import Stack

pytest.importorskip("scipy")

from rekindle.planner.plan_for_budget import plan_by
from rekindle.planner.timeline import simulate

KEEP = Candidate(Keep(), bytes_held=9, forward_seconds=1.0, backward_seconds=2.0)
FAST = Candidate(Recompute(), bytes_held=1, forward_seconds=1.0, backward_seconds=1.5)
SLOW = replace(FAST, backward_seconds=3.0)


def refuse(_options: list[Candidate]) -> list[Candidate]:
    raise AssertionError("nothing is impossible")


def test_times_that_can_be_are_left_alone() -> None:
    assert correct_times([KEEP, SLOW], refuse) == [KEEP, SLOW]


def test_a_recompute_that_is_faster_than_to_keep_is_measured_again_with_it_alone() -> None:
    asked = []

    def again(options: list[Candidate]) -> list[Candidate]:
        asked.append(options)
        return [replace(options[0], backward_seconds=1.0), *options[1:]]

    found = correct_times([KEEP, SLOW, FAST], again)
    assert asked == [[KEEP, FAST]]
    assert found == [replace(KEEP, backward_seconds=1.0), SLOW, FAST]


def test_what_is_impossible_still_takes_as_long_as_to_keep() -> None:
    keep, recompute = correct_times([KEEP, FAST], list)
    assert keep == KEEP
    assert (recompute.forward_seconds, recompute.backward_seconds) == (1.0, 2.0)


def test_within_the_noise_nothing_is_measured_again() -> None:
    near = replace(FAST, seconds_noise=0.6)
    assert correct_times([KEEP, near], refuse)[1].backward_seconds == 2.0


def test_the_host_is_floored_too() -> None:
    keep = replace(KEEP, forward_host_seconds=0.5, backward_host_seconds=0.5)
    found = correct_times(
        [keep, replace(SLOW, forward_host_seconds=0.1, backward_host_seconds=0.7)], list
    )
    assert (found[1].forward_host_seconds, found[1].backward_host_seconds) == (0.5, 0.7)


class _Moody(DeviceClock):
    """Seconds that are off by up to ten times."""

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__(device)
        self._draw = random.Random(seed)

    def seconds(self, begin: Any, end: Any) -> float:
        return super().seconds(begin, end) * 10 ** self._draw.uniform(-1, 1)


@pytest.mark.parametrize("seed", range(3))
def test_no_candidate_is_predicted_to_be_faster_than_no_plan_whatever_the_clock_says(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    bench = replace(measuring_device(cpu), clock=_Moody(cpu, seed))
    monkeypatch.setattr(planning, "measuring_device", lambda *_: bench)
    profile = rekindle.profile(Stack(3, 16), torch.randn(32, 16))
    count = len(profile.order)
    keep = [option for option in profile.blocks[0].candidates if option.strategy == Keep()]
    plain = simulate(profile, keep * count).seconds
    for option in profile.blocks[0].candidates:
        assert simulate(profile, [option] * count).seconds >= plain


def plan_of(*options: Candidate) -> rekindle.Plan:
    block = BlockProfile("Block", "Block", (KEEP, *options))
    profile = Profile("Stack", "cpu", "", 0, 0, 0, 0.0, 0.0, (block,), (("blocks.0", 0),))
    chosen = list(options)[-1:]
    return plan_by(profile, 100, chosen, simulate(profile, chosen), 0.0)


def test_a_plan_of_an_impossible_profile_is_not_printed_as_faster_than_no_plan() -> None:
    plan = plan_of(FAST)
    assert plan.plain_time == plan.predicted_time == 2.5
    assert "(1.00x without a plan)" in str(plan)
    assert "(1.00x without a plan)" in str(replace(plan, plain_time=9.0))  # of an older file


def test_a_measure_step_that_is_faster_than_a_plain_one_shows_that_the_plain_one_was_wrong() -> (
    None
):
    plan = plan_of(SLOW).measured(1, 2.0)
    assert (plan.plain_time, plan.predicted_time, plan.measured_time) == (2.0, 4.0, 2.0)
    assert "(2.00x without a plan)" in str(plan)


def hosts(*candidates: Candidate) -> list[tuple[float, float]]:
    found = with_plausible_hosts(candidates)
    return [(each.forward_host_seconds, each.backward_host_seconds) for each in found]


def on_a_host(strategy: Any, held: int, forward: float, backward: float) -> Candidate:
    return Candidate(strategy, held, forward_host_seconds=forward, backward_host_seconds=backward)


def test_saved_indices_have_the_host_do_no_more_than_a_recompute_of_all() -> None:
    drop, indices = on_a_host(Recompute(), 1, 2.0, 4.0), on_a_host(SavedIndices((0,)), 5, 3.0, 3.0)
    assert hosts(KEEP, drop, indices)[1:] == [(2.0, 4.0), (2.0, 3.0)]


def test_op_by_op_the_forward_is_the_same_and_a_backward_that_replays_less_is_no_longer() -> None:
    many = on_a_host(Selective(NumberedOps((0, 1))), 9, 5.0, 7.0)
    few = on_a_host(Selective(NumberedOps((0,))), 5, 4.0, 6.0)
    none = on_a_host(Selective(NumberedOps(())), 1, 6.0, 8.0)
    assert hosts(KEEP, many, few, none)[1:] == [(4.0, 6.0), (4.0, 6.0), (4.0, 8.0)]
