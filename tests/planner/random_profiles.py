"""Profiles drawn at random, and every choice of candidates for them."""

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest

from rekindle.planner.solve.solver import choose
from rekindle.planner.timeline import simulate
from rekindle.planner.types import BlockProfile, Candidate, Prediction, Profile, Solution
from rekindle.strategy import Keep, NumberedOps, Recompute, Selective, Strategy

KIB, MIB, GIB = 2**10, 2**20, 2**30
GAP = 1e-3
"""A share of the time: more than HiGHS is asked for, less than anybody would notice."""
LINK_GAP = 0.04
"""With a link, the solver's view of the step is rough, and its answer is improved step by step."""


WHOLE: dict[str, Strategy] = {"keep": Keep(), "recompute": Recompute()}
MOVE_ONE = Selective(NumberedOps(offloaded=(1,)))


def random_candidate(
    draw: random.Random, fate: str, size: int, second: float, link: bool
) -> Candidate:
    """More held, less to run again; what is moved is not held. To keep all is the fastest."""
    share = {"keep": 1.0, "recompute": 0.1}.get(fate) or draw.uniform(0.15, 0.9)
    held = int(share * size)
    moved = int(draw.uniform(0.2, 0.9) * held) if link and fate == "select" else 0
    longer = draw.uniform(1, 1.3)
    forward = second * (1.0 if fate == "keep" else longer)
    results = {"offloaded" if moved else "kept": (1, 2)}
    return Candidate(
        Selective(NumberedOps(**results)) if fate == "select" else WHOLE[fate],
        bytes_held=held - moved,
        bytes_moved=moved,
        largest_moved=moved // 2,
        forward_seconds=forward,
        backward_seconds=2 * forward + (1 - share) * second * draw.uniform(0.5, 1.5),
        forward_peak=int(held * draw.uniform(1, 1.4)),
        backward_peak=int(size * draw.uniform(0.2, 1.2)),
    )


@cache
def random_profile(
    seed: int,
    *,
    kinds: int = 2,
    blocks: int = 5,
    link: bool = True,
    unit: int = MIB,
    second: float = 1e-3,
) -> Profile:
    """Kinds of blocks in any order, with menus of four; link: an option moves some bytes."""
    draw = random.Random(seed)
    known = []
    for name in ("Left", "Right")[:kinds]:
        size = int(draw.uniform(50, 150) * unit)
        fates = [("keep", False), ("recompute", False), ("select", False), ("select", link)]
        menu = tuple(random_candidate(draw, fate, size, second, moves) for fate, moves in fates)
        known.append(BlockProfile(name, name, menu))
    order = tuple((f"blocks.{i}", draw.randrange(kinds)) for i in range(blocks))
    return Profile(
        model="Toy",
        device="none",
        batch="a batch",
        static_bytes=int(draw.uniform(0, 300) * unit),
        before_bytes=int(draw.uniform(0, 30) * unit),
        rest_peak=int(draw.uniform(0, 200) * unit),
        rest_seconds=second,
        bytes_per_second=100 * unit / second / 3 if link else 0.0,
        blocks=tuple(known),
        order=order,
    )


def layers(count: int, kinds: int = 1) -> Profile:
    """The layers of a large model, with menus as long as one that was measured."""
    known = tuple(
        BlockProfile(f"Layer{i}", f"Layer{i}", long_menu((1.7 - 0.4 * i) * GIB))
        for i in range(kinds)
    )
    order = tuple((f"layers.{i}", i % kinds) for i in range(count))
    return Profile("Llama", "none", "a batch", 0, 64 * MIB, GIB, 5e-3, 55e9, known, order)


def long_menu(size: float) -> tuple[Candidate, ...]:
    shares = (1.0, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
    menu = [
        Candidate(
            Keep() if share == 1 else Recompute() if share == 0.1 else Selective(NumberedOps((1,))),
            bytes_held=int(share * size),
            forward_seconds=8e-3,
            backward_seconds=16e-3 + (1 - share) ** 2 * 7.7e-3,
            forward_peak=int((share + 0.1) * size),
            backward_peak=int((1.3 - share) * size),
        )
        for share in shares
    ]
    menu += [
        replace(
            o,
            strategy=MOVE_ONE,
            bytes_held=o.bytes_held // 9,
            bytes_moved=8 * o.bytes_held // 9,
        )
        for o in menu
        if isinstance(o.strategy, Selective)
    ]
    return tuple(menu)


@cache
def all_choices(profile: Profile) -> list[Prediction]:
    """The predictions of every choice there is. Several tests look at the same profiles."""
    menus = [profile.candidates(i) for i in range(len(profile.order))]
    return [simulate(profile, options) for options in itertools.product(*menus)]


BUDGETS = 8


def budgets(choices: list[Prediction]) -> list[int]:
    """From the lowest peak there is to the highest; the same for every test, to solve each once."""
    peaks = sorted({choice.peak for choice in choices})
    return [peaks[i * (len(peaks) - 1) // (BUDGETS - 1)] for i in range(BUDGETS)]


def fastest(choices: list[Prediction], budget: int) -> float:
    return min(choice.seconds for choice in choices if choice.peak <= budget)


@cache
def chosen(profile: Profile, budget: int) -> Solution:
    """The solver's choice, of which several tests check one property each."""
    choice = choose(profile, budget)
    assert choice is not None, "something fits"
    return choice


SEEDS = range(8)
every_profile = pytest.mark.parametrize("seed", SEEDS)
of_one_kind_and_of_two = pytest.mark.parametrize("kinds", [1, 2], ids=["one kind", "two kinds"])
with_and_without_a_link = pytest.mark.parametrize("link", [True, False], ids=["link", "no link"])
SCALES = {
    "a large model": (16 * MIB, 1e-1),
    "a usual model": (MIB, 1e-3),
    "a toy": (KIB, 1e-5),
    "a toy's toy": (7, 1e-6),  # contrived: so small that a solver's tolerances would show
}
every_scale = pytest.mark.parametrize(("unit", "second"), SCALES.values(), ids=SCALES)
