"""Measures the candidates of a compiled block: each budget has graphs of its own.

Every budget is compiled here, once for all blocks of a kind, and traced while it is. A budget whose
graphs save what those of another one do is no candidate. Neither is one whose gradients are not
those of the block without a plan but for rounding: a partitioner that draws random numbers anew
would give others.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from math import sqrt

from rekindle.planner.candidates import (
    compiled_candidates,
    keeping_saved_at,
    offloading,
    with_names,
)
from rekindle.planner.gradient_fingerprints import GradientFingerprints, differing_keys
from rekindle.planner.measure.block_benchmark import BlockBenchmark
from rekindle.planner.measure.correct_times import no_faster_than
from rekindle.planner.measure.measure_candidates import (
    host_seconds_of_a_move,
    measure_candidates,
)
from rekindle.planner.ranks.joint_candidates import agree_on_candidates
from rekindle.planner.types import BlockTrace, Candidate
from rekindle.strategy import Recompute, Strategy, TierName

_log = logging.getLogger("rekindle")

_ROUNDING = 1 / 16
"""The most that gradients of another partition may be off, relative to the norm of all of them."""


def measure_compiled(
    benchmark: BlockBenchmark | None, tier: TierName | None
) -> dict[str, Candidate]:
    """Return the candidates of a compiled block by name, the first of which keeps all.

    `tier` is where results are moved to, if they can be. Ranks call it together, without a
    benchmark where a rank has not run the block.
    """
    if benchmark is None:
        return measure_candidates(None, agree_on_candidates(None, ()))
    offered = _distinct(benchmark)
    traces = {candidate.strategy: trace for candidate, trace in offered}
    own = [candidate for candidate, _ in offered]
    agreed = agree_on_candidates(offered[0][1], own)
    measured = measure_candidates(benchmark, agreed)
    for name, candidate in measured.items():
        if candidate.strategy not in traces:  # which another rank has found
            traces[candidate.strategy] = benchmark.trace_compiled(candidate.strategy)
        measured[name] = with_names(candidate, traces[candidate.strategy])
    if tier is not None:
        measured |= _moving(benchmark, measured, traces, tier)
    return measured


_Traced = tuple[Candidate, BlockTrace]


def _distinct(benchmark: BlockBenchmark) -> list[_Traced]:
    """The candidates whose graphs save other tensors, with right gradients; first keep."""
    found: list[_Traced] = []
    plain: GradientFingerprints = {}
    for candidate in compiled_candidates():
        if candidate.strategy == Recompute():  # by the graphs of the first
            found.append((candidate, found[0][1]))
            continue
        trace = benchmark.trace_compiled(candidate.strategy)
        if any(_saves(trace) == _saves(other) for _, other in found):
            continue
        gradients = benchmark.gradients(candidate.strategy)
        plain = plain or gradients
        if _distance(plain, gradients) > _ROUNDING:
            _log.warning(
                "%s has other gradients if it is %s: that is left out",
                benchmark,
                candidate.strategy,
            )
            continue
        is_exact = not differing_keys(plain, gradients)
        found.append((replace(candidate, is_exact=is_exact), trace))
    return found


def _saves(trace: BlockTrace) -> list[tuple[int, bool] | None]:
    """Bytes of the tensors that are saved, and whether each is an input; None for a parameter."""
    values = trace.values
    return [
        None if v is None else (values[v].nbytes, values[v].is_input) for v in trace.saved_tensors
    ]


def _distance(plain: GradientFingerprints, found: GradientFingerprints) -> float:
    """How far apart gradients are, all of them together, relative to their norm."""
    if plain.keys() != found.keys():
        return float("inf")
    norm = sqrt(sum(each.norm**2 for each in plain.values()))
    apart = sqrt(sum(each.distance(found[key]) ** 2 for key, each in plain.items()))
    return apart / norm if norm else apart


def _moving(
    benchmark: BlockBenchmark,
    measured: Mapping[str, Candidate],
    traces: Mapping[Strategy, BlockTrace],
    tier: TierName,
) -> dict[str, Candidate]:
    """Candidates that move some of what the graphs of measured ones save.

    Their costs follow from those, and from the host's time to look at what is saved and to move it.
    """
    keep = measured["keep"]
    by_index = no_faster_than(
        keep, benchmark.measure(keeping_saved_at(keep, traces[keep.strategy]))
    )
    looking = (
        by_index.forward_host_seconds - keep.forward_host_seconds,
        by_index.backward_host_seconds - keep.backward_host_seconds,
    )
    host_seconds = host_seconds_of_a_move(benchmark, by_index, traces[keep.strategy], tier)
    found: dict[str, Candidate] = {}
    for name, candidate in measured.items():
        if candidate.strategy == Recompute():
            continue
        trace = traces[candidate.strategy]
        whole = replace(
            keeping_saved_at(candidate, trace),
            forward_host_seconds=candidate.forward_host_seconds + looking[0],
            backward_host_seconds=candidate.backward_host_seconds + looking[1],
        )
        for i, moving in enumerate(offloading(whole, trace, host_seconds, tier)):
            found[f"{name}, {i} moved"] = with_names(moving, trace)
    return found
