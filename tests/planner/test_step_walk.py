"""The moments of a step as reports draw them: those of the timeline, and nothing else."""

import random

import pytest

from rekindle.planner.step_log import MemoryAt
from rekindle.planner.step_walk import Copy, StepWalk, walk_step
from rekindle.planner.timeline import Timeline, simulate
from rekindle.planner.types import Candidate, Profile
from tests.planner.random_profiles import every_profile, random_profile
from tests.planner.test_timeline import DROP, KEEP, MOVE, profile_of


def walked(profile: Profile, candidates: list[Candidate]) -> StepWalk:
    return walk_step(Timeline(profile), candidates)


def random_step(seed: int) -> tuple[Profile, list[Candidate]]:
    profile, draw = random_profile(seed, blocks=7), random.Random(seed)
    return profile, [draw.choice(profile.candidates(i)) for i in range(7)]


@every_profile
def test_the_highest_moment_is_the_predicted_peak(seed: int) -> None:
    profile, candidates = random_step(seed)
    walk = walked(profile, candidates)
    highest = max(walk.moments, key=lambda moment: sum(moment.memory))
    assert profile.static_bytes + sum(highest.memory) == walk.peak
    assert walk.moments[walk.peak_moment] == highest


@every_profile
def test_peak_time_and_place_are_those_that_the_timeline_predicts(seed: int) -> None:
    profile, candidates = random_step(seed)
    walk, found = walked(profile, candidates), simulate(profile, candidates)
    assert (walk.peak, walk.seconds) == (found.peak, found.seconds)
    assert walk.moments[walk.peak_moment].at == found.at


@every_profile
def test_moments_follow_each_other_from_the_start_to_the_end_of_the_step(seed: int) -> None:
    walk = walked(*random_step(seed))
    times = [time for moment in walk.moments for time in (moment.begin, moment.end)]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (0.0, walk.seconds)


def test_each_block_has_a_moment_in_the_forward_and_one_in_the_backward() -> None:
    found = walked(profile_of(2), [KEEP, DROP]).moments
    assert [(moment.phase, moment.place) for moment in found] == [
        *[("forward", None), ("forward", 0), ("forward", 1)],
        ("loss", None),
        *[("backward", 1), ("backward", 0), ("backward", None)],
    ]


def test_memory_is_told_apart_by_its_cause() -> None:
    found = walked(profile_of(2, before_bytes=7, rest_peak=40), [KEEP, DROP]).moments
    assert [moment.memory for moment in found[1:6]] == [
        MemoryAt(7, 0, 0, 0, 110),
        MemoryAt(7, 100, 0, 0, 90),
        MemoryAt(7, 110, 0, 0, 40),
        MemoryAt(7, 110, 0, 0, 120),
        MemoryAt(7, 100, 0, 0, 30),
    ]


def test_a_block_that_frees_its_input_frees_what_was_made_outside() -> None:
    frees = Candidate(DROP.strategy, 10, 0, 1.0, 3.0, 90, 120, input_freed=50)
    profile = profile_of(2, before_bytes=60, passed=(50, 0))
    found = walked(profile, [frees, KEEP]).moments
    assert found[2].memory == MemoryAt(60 - 40, 0, 0, 0, 110)


@pytest.mark.parametrize("rate", [100.0, 20.0])
def test_copies_take_their_bytes_over_the_bandwidth(rate: float) -> None:
    walk = walked(profile_of(4, bytes_per_second=rate), [MOVE, MOVE, KEEP, KEEP])
    # Two large results stay: those of the second block, and none of the first's.
    assert walk.copies == ()
    walk = walked(profile_of(5, bytes_per_second=rate), [MOVE, MOVE, MOVE, KEEP, KEEP])
    assert [(copy.place, copy.is_out) for copy in walk.copies] == [(0, True), (0, False)]
    assert [copy.end - copy.begin for copy in walk.copies] == pytest.approx([50 / rate] * 2)


def test_a_copy_out_begins_in_the_middle_of_the_forward_that_made_it() -> None:
    walk = walked(profile_of(5), [MOVE, MOVE, MOVE, KEEP, KEEP])
    assert walk.copies[0] == Copy(0, True, 0.5, 1.0)
