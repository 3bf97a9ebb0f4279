"""Calibrates times of candidates that go op by op to the time of a whole step.

Alone, a block is timed on a device that is kept busy, device and host apart. In a step it follows
other blocks, and a strategy that keeps the host busier may take longer than that. So one step runs
with every block op by op, and its extra time is added to the candidates that go op by op.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from rekindle.modules.apply_strategies import apply_strategies, undo
from rekindle.modules.unwrapping import in_places
from rekindle.planner.ranks.rank_sync import all_gather, has_other_ranks
from rekindle.planner.timeline import simulate
from rekindle.planner.types import Candidate, Profile
from rekindle.strategy import Recompute, Selective


def calibrate_to_whole_step(
    model: nn.Module, profile: Profile, seconds_of_a_step: Callable[[], float]
) -> Profile:
    """Return the profile, with candidates that go op by op as slow as a whole step by them."""
    leanest = _within_recompute_peak(profile)
    count = sum(isinstance(candidate.strategy, Selective) for candidate in leanest)
    if not count:
        return profile
    paths = (path for path, _ in profile.order)
    strategies = {path: candidate.strategy for path, candidate in zip(paths, leanest, strict=True)}
    apply_strategies(model, in_places(model, strategies))
    try:
        measured = max(all_gather(seconds_of_a_step()))
    except torch.OutOfMemoryError:  # it holds more than with everything recomputed
        if has_other_ranks():  # which would wait for a rank that does not run its step
            raise
        return profile
    finally:
        undo(model)
    extra = max(measured - simulate(profile, leanest).seconds, 0.0) / count
    blocks = (
        replace(
            block, candidates=tuple(_slower(candidate, extra) for candidate in block.candidates)
        )
        for block in profile.blocks
    )
    return replace(profile, blocks=tuple(blocks))


SLACK = 0.05
"""Share of the activations' peak, with every block recomputed, that profiling may add to it."""


def _within_recompute_peak(profile: Profile) -> list[Candidate]:
    """Return candidates op by op for as many blocks as there is room for, recompute for the others.

    The step may peak as high as one with every block recomputed, and a little: Note [What profiling
    may hold]. With less than a quarter of the blocks there is too little to tell from noise.
    """
    blocks = [profile.candidates(i) for i in range(len(profile.order))]
    recomputing = [
        next(c for c in candidates if c.strategy == Recompute()) for candidates in blocks
    ]
    leanest = [_leanest(block) for block in blocks]
    room = simulate(profile, recomputing).peak - profile.static_bytes
    if profile.recompute_peak is not None:  # which was measured
        room = min(room, profile.recompute_peak - profile.static_bytes)
    limit = profile.static_bytes + (1 + SLACK) * room
    first = 0  # a replay is on top of less where those that hold more come later
    while first < len(blocks) and (
        simulate(profile, recomputing[:first] + leanest[first:]).peak > limit
    ):
        first += 1
    return [] if 4 * first > 3 * len(blocks) else recomputing[:first] + leanest[first:]


def _leanest(candidates: tuple[Candidate, ...]) -> Candidate:
    """Return the candidate that goes op by op and holds least; else the one that recomputes all."""
    still = [candidate for candidate in candidates if not candidate.bytes_moved]
    selecting = [candidate for candidate in still if isinstance(candidate.strategy, Selective)]
    return min(
        selecting or [candidate for candidate in still if candidate.strategy == Recompute()],
        key=lambda candidate: candidate.bytes_held,
    )


def _slower(candidate: Candidate, seconds: float) -> Candidate:
    """Return a candidate that goes op by op with some more seconds; others as they are."""
    if not isinstance(candidate.strategy, Selective):
        return candidate
    return replace(
        candidate,
        forward_seconds=candidate.forward_seconds + seconds / 2,
        backward_seconds=candidate.backward_seconds + seconds / 2,
        # 0: there is no host beside the device
        forward_host_seconds=candidate.forward_host_seconds
        and candidate.forward_host_seconds + seconds / 2,
        backward_host_seconds=candidate.backward_host_seconds
        and candidate.backward_host_seconds + seconds / 2,
    )
