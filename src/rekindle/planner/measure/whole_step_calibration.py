"""What blocks run alone do not show: how long they take together.

Alone, a block is timed on a device that is kept busy, device and host apart. In a step it follows
others, and an option that has the host do more may take longer than that tells. So one step runs
with every block op by op, and what it takes longer than it should is added to them.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from rekindle.modules.apply_strategies import apply, undo
from rekindle.modules.unwrapping import in_places
from rekindle.planner.candidate_to_strategy import what_of
from rekindle.planner.ranks.rank_sync import all_gather, has_other_ranks
from rekindle.planner.timeline import simulate
from rekindle.planner.types import Option, Profile


def told_together(
    model: nn.Module, profile: Profile, seconds_of_a_step: Callable[[], float]
) -> Profile:
    """The profile, with options that go op by op as slow as a whole step by them is."""
    leanest = _within_recompute_peak(profile)
    count = sum(option.fate == "select" for option in leanest)
    if not count:
        return profile
    paths = (path for path, _ in profile.order)
    ways = {path: what_of(option) for path, option in zip(paths, leanest, strict=True)}
    apply(model, in_places(model, ways))
    try:
        taken = max(all_gather(seconds_of_a_step()))
    except torch.OutOfMemoryError:  # it holds more than with everything recomputed
        if has_other_ranks():  # which would wait for a rank that does not run its step
            raise
        return profile
    finally:
        undo(model)
    late = max(taken - simulate(profile, leanest).seconds, 0.0) / count
    blocks = (
        replace(block, options=tuple(_later(option, late) for option in block.options))
        for block in profile.blocks
    )
    return replace(profile, blocks=tuple(blocks))


SLACK = 0.05
"""The share of what activations take with every block recomputed that profiling may add to it."""


def _within_recompute_peak(profile: Profile) -> list[Option]:
    """Options op by op for as many blocks as there is room for, recompute for the others.

    The step may peak as high as one with every block recomputed, and a little: Note [What profiling
    may hold]. With less than a quarter of the blocks there is too little to tell from noise.
    """
    menus = [profile.options(i) for i in range(len(profile.order))]
    recomputed = [next(option for option in menu if option.fate == "recompute") for menu in menus]
    leanest = [_leanest(menu) for menu in menus]
    room = simulate(profile, recomputed).peak - profile.static_bytes
    if profile.recompute_peak is not None:  # which was measured
        room = min(room, profile.recompute_peak - profile.static_bytes)
    limit = profile.static_bytes + (1 + SLACK) * room
    first = 0  # a replay is on top of less where those that hold more come later
    while first < len(menus) and (
        simulate(profile, recomputed[:first] + leanest[first:]).peak > limit
    ):
        first += 1
    return [] if 4 * first > 3 * len(menus) else recomputed[:first] + leanest[first:]


def _leanest(menu: tuple[Option, ...]) -> Option:
    """The option that goes op by op and holds least; else the one that recomputes all."""
    still = [option for option in menu if not option.bytes_moved]
    selecting = [option for option in still if option.fate == "select"]
    return min(
        selecting or [option for option in still if option.fate == "recompute"],
        key=lambda option: option.bytes_held,
    )


def _later(option: Option, seconds: float) -> Option:
    if option.fate != "select":
        return option
    return replace(
        option,
        forward_seconds=option.forward_seconds + seconds / 2,
        backward_seconds=option.backward_seconds + seconds / 2,
        # 0: there is no host beside the device
        forward_host=option.forward_host and option.forward_host + seconds / 2,
        backward_host=option.backward_host and option.backward_host + seconds / 2,
    )
