"""The options of a block, measured on every rank that runs it, as one menu for all.

Ranks that run the same ops in a block measure the same options. Others, as where an expert gets no
tokens on one of them, have options of their own that stand for the same: each keeps, recomputes or
moves results of the rank's own graph. Where such a block runs collectives, what is recomputed has
to be the same on all ranks: there a block is kept or recomputed as a whole.
"""

from dataclasses import dataclass

from rekindle.offload.offload_options import TierName
from rekindle.planner.candidates import (
    keeping_saved,
    offloading,
    recomputing_saved,
    selecting,
    undominated,
    with_names,
)
from rekindle.planner.measure.block_benchmark import BlockBenchmark
from rekindle.planner.measure.plausible import at_least, plausible
from rekindle.planner.progress import count_progress
from rekindle.planner.ranks.rank_sync import all_gather
from rekindle.planner.ranks.worst_case import worst_candidates
from rekindle.planner.types import BlockTrace, Candidate
from rekindle.strategy import Keep, Recompute, SavedIndices, Selective

_Menu = dict[str, Candidate]
"""Candidates by what they stand for, which has the same name on every rank."""


@dataclass(frozen=True)
class _Offer:
    """What one rank would measure of a block."""

    structure: str
    communicates: bool
    candidates: _Menu


def joint_menu(
    run: BlockBenchmark | None, bytes_per_second: float, tier: TierName
) -> tuple[Candidate, ...]:
    """The options of a block, each measured, without those that another is better than.

    All ranks call it at a time, without a `run` on those that have not run the block; their options
    are those of the first rank that has.
    """
    trace = None if run is None else run.trace()
    candidates = _candidates(run, trace)
    measured: list[Candidate] = []
    if run is not None:
        measured = [
            run.measured(found) for found in count_progress(list(candidates.values()), "candidate")
        ]
        measured = plausible(measured, run.timed_again)
    else:
        plausible([], lambda _: [])
    menu = dict(zip(candidates, measured, strict=True))
    if bytes_per_second and run is not None and trace is not None:
        menu |= _moving(run, trace, menu, tier)
    if trace is not None:
        menu = {name: with_names(found, trace) for name, found in menu.items()}
    return tuple(undominated(_worst(menu)))


def _candidates(run: BlockBenchmark | None, trace: BlockTrace | None) -> _Menu:
    """What to measure on this rank; on all of them the same number of options, in one order."""
    from rekindle.planner.keep_sets import keep_sets  # needs scipy  # noqa: PLC0415

    offer = None
    if run is not None and trace is not None:
        derived = recomputing_saved(run.derivable(trace), trace)
        kept = [selecting(kept, trace) for kept in keep_sets(trace)]
        own = {"keep": Candidate(Keep()), "recompute": Candidate(Recompute())}
        own |= {f"derive {i}": found for i, found in enumerate(derived)}
        own |= {f"select {i}": found for i, found in enumerate(kept)}
        offer = _Offer(trace.structure(), trace.communicates, own)
    offers = [other for other in all_gather(offer) if other is not None]
    if offer is None:
        return {}
    if all(other.structure == offer.structure for other in offers):
        return offers[0].candidates
    if any(other.communicates for other in offers):
        return {name: offer.candidates[name] for name in ("keep", "recompute")}
    return {name: offer.candidates[name] for name in _common([o.candidates for o in offers])}


def _common(menus: list[_Menu]) -> list[str]:
    """The options that all menus have."""
    return [name for name in menus[0] if all(name in menu for menu in menus)]


def _worst(menu: _Menu) -> list[Candidate]:
    """The candidates that all ranks have measured, each with the most that any rank has."""
    menus = [other for other in all_gather(menu) if other]
    names = _common(menus)
    lists = [[other[name] for name in names] for other in menus]
    own = [(menu or menus[0])[name] for name in names]
    return worst_candidates(lists, own)


def _moving(run: BlockBenchmark, trace: BlockTrace, menu: _Menu, tier: TierName) -> _Menu:
    """Candidates that move what others keep."""
    whole = at_least(run.measured(keeping_saved(trace)), menu["keep"])
    host = _host_of_a_move(run, whole, trace, tier)
    several = {"saves": whole} | {
        name: found
        for name, found in menu.items()
        if isinstance(found.strategy, SavedIndices | Selective)
    }
    return {
        f"{name}, {i} away": less
        for name, found in several.items()
        for i, less in enumerate(offloading(found, trace, host, tier))
    }


def _host_of_a_move(
    run: BlockBenchmark, whole: Candidate, trace: BlockTrace, tier: TierName
) -> tuple[float, float]:
    """Seconds that it takes the host to send a result away, and to bring it back."""
    moving = offloading(whole, trace, tier=tier)[:-1]  # the n-th moves n results, the last any
    if not whole.forward_host_seconds or not moving:
        return 0.0, 0.0
    moved = run.measured(moving[-1])
    count = max(len(moving) - _STAYING, 1)
    return (
        max(moved.forward_host_seconds - whole.forward_host_seconds, 0.0) / count,
        max(moved.backward_host_seconds - whole.backward_host_seconds, 0.0) / count,
    )


_STAYING = 2
"""Results that stay after all, because the backward wants them first."""
