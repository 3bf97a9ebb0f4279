"""Times a step in which blocks go op by op, and calibrates the candidates that do.

Alone, a block is timed on a device that is kept busy, device and host apart. In a step it follows
other blocks, and a strategy that keeps the host busier may take longer than that; or less, as the
host has done the same for the block before.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from rekindle.modules.apply_strategies import apply_strategies, undo
from rekindle.modules.unwrapping import in_places
from rekindle.planner.candidates import recomputing_all
from rekindle.planner.measure.step_calibration import calibrate_op_by_op
from rekindle.planner.ranks.rank_sync import has_other_ranks
from rekindle.planner.timeline import simulate
from rekindle.planner.types import BlockSpans, Candidate, Profile
from rekindle.strategy import Recompute, Selective


def calibrate_to_whole_step(
    model: nn.Module,
    profile: Profile,
    order: Sequence[str],
    time_blocks: Callable[[], BlockSpans],
) -> Profile:
    """Return the profile, with candidates that go op by op as fast as they are in a whole step.

    Args:
        model: the model, whose blocks are given strategies for the step.
        profile: the profile.
        order: the blocks of this rank's step.
        time_blocks: runs the step, and returns the times of its blocks.
    """
    lean = min((profile.with_rests(rest) for rest in (*profile.rests, profile.rest)), key=_peak)
    leanest = _within_recompute_peak(lean)
    if not any(isinstance(candidate.strategy, Selective) for candidate in leanest):
        return profile
    paths = (path for path, _ in profile.order)
    strategies = {path: candidate.strategy for path, candidate in zip(paths, leanest, strict=True)}
    strategies |= {path: strategy for path, _, strategy in lean.heads}
    apply_strategies(model, in_places(model, strategies))
    try:
        spans = time_blocks()
    except torch.OutOfMemoryError:  # it holds more than with everything recomputed
        if has_other_ranks():  # which would wait for a rank that does not run its step
            raise
        return profile
    finally:
        undo(model)
    return replace(profile, blocks=calibrate_op_by_op(lean, leanest, order, spans).blocks)


def _peak(profile: Profile) -> float:
    """The measured peak of a step with every block recomputed."""
    return float("inf") if profile.recompute_peak is None else profile.recompute_peak


SLACK = 0.05
"""Share of the activations' peak, with every block recomputed, that profiling may add to it."""


def _within_recompute_peak(profile: Profile) -> list[Candidate]:
    """Return candidates op by op for as many blocks as there is room for, recompute for the others.

    The step may peak as high as one with every block recomputed, and a little: Note [What profiling
    may hold].
    """
    recomputing = recomputing_all(profile)
    leanest = [_leanest(profile.candidates(i)) for i in range(len(profile.order))]
    room = simulate(profile, recomputing).peak - profile.static_bytes
    if profile.recompute_peak is not None:  # which was measured
        room = min(room, profile.recompute_peak - profile.static_bytes)
    limit = profile.static_bytes + (1 + SLACK) * room
    first = 0  # a replay is on top of less where those that hold more come later
    while first < len(leanest) and (
        simulate(profile, recomputing[:first] + leanest[first:]).peak > limit
    ):
        first += 1
    return recomputing[:first] + leanest[first:]


def _leanest(candidates: tuple[Candidate, ...]) -> Candidate:
    """Return the candidate that goes op by op and holds least; else the one that recomputes all."""
    still = [candidate for candidate in candidates if not candidate.bytes_moved]
    selecting = [candidate for candidate in still if isinstance(candidate.strategy, Selective)]
    return min(
        selecting or [candidate for candidate in still if candidate.strategy == Recompute()],
        key=lambda candidate: candidate.bytes_held,
    )
