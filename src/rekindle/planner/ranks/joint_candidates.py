"""The candidates of a block that several ranks run, as one list for all of them.

Ranks that run the same ops in a block measure the same candidates. Others, as where an expert gets
no tokens on one of them, have candidates of their own under the same names: each keeps, recomputes
or moves results of the rank's own trace. Where such a block runs collectives, ranks have to
recompute the same ones: there a block is kept or recomputed as a whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rekindle.planner.ranks.rank_sync import all_gather
from rekindle.planner.ranks.worst_case import worst_candidates
from rekindle.planner.types import BlockTrace, Candidate

NamedCandidates = Mapping[str, Candidate]
"""Candidates by names that are the same on every rank: `keep`, `recompute`, `Selective 2`."""


@dataclass(frozen=True)
class _Offer:
    """The candidates that one rank would measure of a block."""

    structure: str
    communicates: bool
    candidates: NamedCandidates


def agree_on_candidates(
    trace: BlockTrace | None, candidates: Sequence[Candidate]
) -> NamedCandidates:
    """Return the candidates to measure on this rank: as many on each rank, in one order.

    Ranks call it together, without a trace and candidates where a rank has not run the block; then
    it returns none.
    """
    offer = None
    if trace is not None:
        offer = _Offer(trace.structure(), trace.communicates, _named(candidates))
    offers = [other for other in all_gather(offer) if other is not None]
    if offer is None:
        return {}
    if all(other.structure == offer.structure for other in offers):
        return offers[0].candidates
    if any(other.communicates for other in offers):
        return {name: offer.candidates[name] for name in ("keep", "recompute")}
    names = _common_names([other.candidates for other in offers])
    return {name: offer.candidates[name] for name in names}


def _named(candidates: Sequence[Candidate]) -> dict[str, Candidate]:
    """Candidates by their strategy's class, and a number among those of the class."""
    found: dict[str, Candidate] = {}
    counts: dict[str, int] = {}
    for candidate in candidates:
        kind = type(candidate.strategy).__name__
        number = counts[kind] = counts.get(kind, -1) + 1
        is_whole = kind in ("Keep", "Recompute")
        found[kind.lower() if is_whole else f"{kind} {number}"] = candidate
    return found


def worst_of_ranks(measured: NamedCandidates) -> list[Candidate]:
    """Return the candidates that all ranks have measured, each with the most that any rank has.

    On a rank that has not run the block, they are those of the first rank that has.
    """
    all_measured = [other for other in all_gather(measured) if other]
    names = _common_names(all_measured)
    lists = [[other[name] for name in names] for other in all_measured]
    own = [(measured or all_measured[0])[name] for name in names]
    return worst_candidates(lists, own)


def _common_names(measured: Sequence[NamedCandidates]) -> list[str]:
    """Names that all ranks have."""
    return [name for name in measured[0] if all(name in other for other in measured)]
