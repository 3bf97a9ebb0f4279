"""Clocks are noisy and bytes are not: what a profile can do for memory does not depend on times."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import rekindle
from rekindle._api import planning
from rekindle.planner.candidates import undominated
from rekindle.planner.instruments.timing import DeviceClock
from rekindle.planner.profile_model import measuring_device
from rekindle.planner.types import Candidate
from rekindle.strategy import (
    Keep,
    NumberedOps,
    Recompute,
    SavedIndices,
    Selective,
    Strategy,
    TierName,
)
from tests.toys import Stack

pytest.importorskip("scipy")

from rekindle.planner.solve.solver import least_peak


def sizes(option: Candidate) -> tuple[int, ...]:
    least_held = option.bytes_held - option.input_freed
    moved = option.bytes_moved, option.largest_moved
    return option.bytes_held, least_held, *moved, option.forward_peak, option.backward_peak


def kind(option: Candidate) -> tuple[Any, ...]:
    return type(option.strategy), option.bytes_moved > 0, option.tier


def needs_no_more(one: Candidate, other: Candidate) -> bool:
    return kind(one) == kind(other) and all(map(int.__le__, sizes(one), sizes(other)))


def _strategy(draw: random.Random, number: int, moved: int) -> Strategy:
    """One of two kinds; what is moved goes to one of two tiers."""
    tier: TierName = draw.choice(["host", "disk"]) if moved else "host"  # type: ignore[arg-type]
    away = (99,) if moved else ()
    if draw.random() < 0.5:
        return SavedIndices((number,), away, tier)
    return Selective(NumberedOps((number,), away, tier))


def random_menu(draw: random.Random) -> list[Candidate]:
    menu = [Candidate(Keep(), bytes_held=9), Candidate(Recompute(), bytes_held=1)]
    for number in range(20):
        moved = draw.choice([0, 0, 3, 4])
        menu.append(
            Candidate(
                _strategy(draw, number, moved),
                bytes_held=draw.randrange(2, 6),
                bytes_moved=moved,
                largest_moved=min(moved, 3),
                forward_peak=draw.randrange(2),
                backward_peak=draw.randrange(3),
            )
        )
    return menu


def noisy(menu: list[Candidate], draw: random.Random) -> list[Candidate]:
    return [
        replace(
            option,
            forward_seconds=draw.uniform(0.5, 2),
            backward_seconds=draw.uniform(0.5, 2),
            seconds_noise=draw.choice([0.0, 0.1, 1.0]),
        )
        for option in menu
    ]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_clock_said_a_candidate_is_left_that_needs_no_more_memory(seed: int) -> None:
    draw = random.Random(seed)
    menu = random_menu(draw)
    for _ in range(20):
        left = undominated(noisy(menu, draw))
        for option in menu:
            assert any(needs_no_more(one, option) for one in left)


SMALL = Candidate(
    Selective(NumberedOps((0,))), bytes_held=5, forward_seconds=1.0, backward_seconds=1.0
)


OTHER = replace(SMALL, strategy=Selective(NumberedOps((1,))))
MOVED = {"bytes_moved": 1, "largest_moved": 1}


def test_a_candidate_with_more_bytes_that_is_slower_beyond_noise_is_pruned() -> None:
    worse = replace(
        SMALL, strategy=Selective(NumberedOps((1,))), bytes_held=6, backward_seconds=1.5
    )
    assert undominated([SMALL, worse]) == [SMALL]


def test_a_candidate_with_more_bytes_that_is_slower_within_noise_stays() -> None:
    menu = [
        replace(SMALL, seconds_noise=0.3),
        replace(
            SMALL,
            strategy=Selective(NumberedOps((1,))),
            bytes_held=6,
            backward_seconds=1.5,
            seconds_noise=0.3,
        ),
    ]
    assert undominated(menu) == menu


@pytest.mark.parametrize(
    "change",
    [
        {"strategy": SavedIndices((0,))},
        {**MOVED, "strategy": Selective(NumberedOps(offloaded=(0,)))},
        {**MOVED, "strategy": Selective(NumberedOps(offloaded=(0,), tier="disk"))},
    ],
    ids=["another strategy", "moves something", "another tier"],
)
def test_a_candidate_is_not_pruned_for_one_of_another_kind(change: dict[str, Any]) -> None:
    menu = [SMALL, replace(SMALL, bytes_held=6, backward_seconds=9.0, **change)]
    assert undominated(menu) == menu


def test_of_candidates_with_the_same_bytes_the_fastest_stays() -> None:
    fast = replace(SMALL, strategy=Selective(NumberedOps((2,))), backward_seconds=0.9)
    slow = replace(OTHER, seconds_noise=5.0)
    assert undominated([SMALL, fast, slow]) == [fast]


class _NoisyClock(DeviceClock):
    """Seconds that are off by up to three times, differently each time they are asked for."""

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__(device)
        self._draw = random.Random(seed)

    def seconds(self, begin: Any, end: Any) -> float:
        return super().seconds(begin, end) * 3 ** self._draw.uniform(-1, 1)


def measured(seed: int, monkeypatch: pytest.MonkeyPatch) -> rekindle.Profile:
    """A profile by a noisy clock."""
    torch.manual_seed(0)
    model, batch = Stack(3, 16), torch.randn(32, 16)
    cpu = torch.device("cpu")
    bench = replace(measuring_device(cpu), clock=_NoisyClock(cpu, seed))
    monkeypatch.setattr(planning, "measuring_device", lambda *_: bench)
    return rekindle.profile(model, batch)


def test_the_least_budget_of_a_profile_does_not_depend_on_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profiles = [measured(seed, monkeypatch) for seed in range(5)]
    assert len({least_peak(profile).prediction.peak for profile in profiles}) == 1


def test_which_results_may_be_kept_does_not_depend_on_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rekindle.planner.profile_model.undominated", list)
    menus = {
        tuple(option.strategy for option in profile.blocks[0].candidates)
        for profile in (measured(seed, monkeypatch) for seed in range(3))
    }
    assert len(menus) == 1
