"""The room at the other end of the link: plans move no more than fits there."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import rekindle
from rekindle.offload.tiers import room
from rekindle.planner.measure import link
from rekindle.planner.plan_for_budget import plain_prediction, plan_by
from rekindle.planner.ranks.worst_case import worst_case
from rekindle.planner.solve import milp, solver
from rekindle.planner.timeline import Timeline, simulate
from rekindle.planner.types import Candidate
from tests.planner.random_profiles import MIB, random_profile
from tests.planner.test_timeline import DROP, KEEP, MOVE, profile_of
from tests.toys import Stack

pytest.importorskip("scipy")


def moved(plan: rekindle.Plan) -> int:
    return sum(candidate.bytes_moved for _, _, candidate in plan.blocks)


def test_no_budget_has_room_for_more_than_the_tier() -> None:
    fast = profile_of(3, bytes_per_second=1e9)
    free = simulate(fast, [MOVE, MOVE, KEEP]).peak
    assert simulate(replace(fast, tier_bytes=100), [MOVE, MOVE, KEEP]).peak == free
    assert simulate(replace(fast, tier_bytes=99), [MOVE, MOVE, KEEP]).peak > 2**60
    assert simulate(replace(fast, tier_bytes=0), [KEEP] * 3) == simulate(fast, [KEEP] * 3)


@pytest.mark.parametrize("seed", range(5))
def test_plans_move_no_more_than_there_is_room_for(seed: int) -> None:
    profile = random_profile(seed, blocks=7)
    least = solver.least_peak(profile).prediction.peak
    budget = (least + plain_prediction(profile).peak) // 2
    wished = moved(rekindle.solve(profile, budget))
    for share in (0.5, 0.25, 0.0):
        limit = int(share * wished)
        bounded = replace(profile, tier_bytes=limit)
        if solver.least_peak(bounded).prediction.peak <= budget:
            assert moved(rekindle.solve(bounded, budget)) <= limit


def test_the_integer_program_is_bounded_too() -> None:
    profile = scaled(profile_of(4, bytes_per_second=1e12))
    free = milp.fastest(Timeline(profile), 240 * MIB)
    bound = milp.fastest(Timeline(replace(profile, tier_bytes=120 * MIB)), 240 * MIB)
    assert free is not None
    assert bound is not None
    assert sum(candidate.bytes_moved for candidate in free.candidates) > 120 * MIB
    assert sum(candidate.bytes_moved for candidate in bound.candidates) == 100 * MIB
    assert bound.prediction.seconds > free.prediction.seconds


def scaled(profile: rekindle.Profile) -> rekindle.Profile:
    """A profile whose candidates have MiB in the place of bytes."""
    names = "bytes_held", "bytes_moved", "largest_moved", "forward_peak", "backward_peak"

    def larger(each: Candidate) -> Candidate:
        return replace(each, **{name: getattr(each, name) * MIB for name in names})

    (block,) = profile.blocks
    return replace(
        profile, blocks=(replace(block, candidates=tuple(map(larger, block.candidates))),)
    )


def test_a_bound_that_is_given_holds_for_plans_of_fit_and_for_larger_calls() -> None:
    model, batch = Stack(6, 64), torch.randn(256, 64)
    keep_or_move = rekindle.profile(model, batch, spill=True)
    wished = moved(rekindle.solve(keep_or_move, "50%"))
    plan = rekindle.fit(model, batch, "50%", profile=keep_or_move, max_offload=f"{wished // 2}B")
    assert moved(plan) <= wished // 2
    model(torch.randn(512, 64)).sum().backward()
    again = rekindle.plan_of(model)
    assert again is not None
    assert again != plan
    assert moved(again) <= wished // 2
    rekindle.remove(model)


def test_a_profile_has_the_bound_that_is_given() -> None:
    model, batch = Stack(2, 8), torch.randn(4, 8)
    found = rekindle.profile(model, batch, device="meta", like="H100", max_offload="3KiB")
    assert found.tier_bytes == 3072
    assert rekindle.profile(model, batch, device="meta", like="H100").tier_bytes is None
    with pytest.raises(ValueError, match="max_offload should not be negative"):
        rekindle.profile(model, batch, max_offload=-1)


def test_a_profile_that_spills_knows_the_room_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "tier_room", lambda tier: {"disk": 4001, "host": 1}[tier])
    model, batch = Stack(2, 8), torch.randn(4, 8)
    assert rekindle.profile(model, batch, spill=True).tier_bytes == 4001
    assert rekindle.profile(model, batch).tier_bytes is None  # nothing can be moved
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert rekindle.profile(model, batch, spill=True).tier_bytes == 1000


def test_the_room_of_the_rank_with_the_least_counts() -> None:
    profiles = [profile_of(2, tier_bytes=room) for room in (None, 70, 50)]
    assert worst_case(profiles, profiles[0]).tier_bytes == 50


def texts(**files: str) -> Callable[[room.Path], str]:
    def read(path: room.Path) -> str:
        if path.name.replace(".", "_") not in files:
            raise FileNotFoundError(path)
        return files[path.name.replace(".", "_")]

    return read


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"meminfo": "MemTotal: 1000 kB\nMemAvailable: 700 kB\n"}, 600 * 1024),
        ({"meminfo": "MemTotal: 1000 kB\nMemAvailable: 50 kB\n"}, 0),
        ({"memory_max": "100000", "memory_current": "30000"}, 60000),
        ({"memory_max": "max", "memory_current": "30000"}, None),
        ({}, None),
    ],
)
def test_host_memory_has_room_but_for_a_tenth(
    files: dict[str, str], left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room.Path, "read_text", texts(**files))
    assert room.tier_room("host") == left


def test_a_plan_says_how_much_it_moves_away() -> None:
    def text(*candidates: Candidate) -> str:
        profile = profile_of(3)
        return str(plan_by(profile, 500, candidates, simulate(profile, candidates), 0.0))

    assert "\n  moved away      100 B to host memory\n" in text(MOVE, KEEP, MOVE)
    assert "moved away" not in text(KEEP, KEEP, DROP)
