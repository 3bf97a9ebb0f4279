"""Measures the candidates of a block, and adds those that move results to host memory or disk."""

from collections.abc import Mapping

from rekindle.planner.candidates import keeping_saved, offloading, selecting
from rekindle.planner.measure.block_benchmark import BlockBenchmark
from rekindle.planner.measure.correct_times import (
    correct_times,
    no_faster_than,
    with_plausible_hosts,
)
from rekindle.planner.progress import count_progress
from rekindle.planner.types import BlockTrace, Candidate
from rekindle.strategy import SavedIndices, Selective, TierName


def measure_candidates(
    benchmark: BlockBenchmark | None, candidates: Mapping[str, Candidate]
) -> dict[str, Candidate]:
    """Return the candidates, the first of which keeps all, with bytes and seconds.

    Ranks call it together, without a benchmark and candidates where a rank has not run the block.
    """
    if benchmark is None:
        correct_times([], lambda _: [])
        return {}
    counted = count_progress(list(candidates.values()), "candidate")
    measured = [benchmark.measure(candidate) for candidate in counted]
    return dict(zip(candidates, correct_times(measured, benchmark.time_again), strict=True))


def offload_candidates(
    benchmark: BlockBenchmark,
    trace: BlockTrace,
    measured: Mapping[str, Candidate],
    tier: TierName,
) -> dict[str, Candidate]:
    """Return candidates that move results which measured ones keep.

    Their costs follow from those of the candidates that keep the results, and from the host's time
    for one move.
    """
    found = benchmark.measure(keeping_saved(trace))
    *_, found = with_plausible_hosts([measured["recompute"], found])
    whole = no_faster_than(measured["keep"], found)
    host_seconds = host_seconds_of_a_move(benchmark, whole, trace, tier)
    keeping = {"saved": whole} | {
        name: candidate
        for name, candidate in measured.items()
        if isinstance(candidate.strategy, SavedIndices | Selective)
    }
    nothing = selecting((), trace)
    if trace.input_bytes and all(each.strategy != nothing.strategy for each in keeping.values()):
        keeping["nothing"] = benchmark.measure(nothing)  # so that its input alone may move
    return {
        f"{name}, {i} moved": moving
        for name, candidate in keeping.items()
        for i, moving in enumerate(offloading(candidate, trace, host_seconds, tier))
    }


def host_seconds_of_a_move(
    benchmark: BlockBenchmark, whole: Candidate, trace: BlockTrace, tier: TierName
) -> tuple[float, float]:
    """Return the host's seconds to copy one result out, and to copy it back."""
    moving = offloading(whole, trace, tier=tier)[:-1]  # the n-th moves n results, the last any
    if not whole.forward_host_seconds or not moving:
        return 0.0, 0.0
    moved = benchmark.measure(moving[-1])
    count = max(len(moving) - _STAYING, 1)
    return (
        max(moved.forward_host_seconds - whole.forward_host_seconds, 0.0) / count,
        max(moved.backward_host_seconds - whole.backward_host_seconds, 0.0) / count,
    )


_STAYING = 2
"""Results that stay after all, because the backward wants them first."""
