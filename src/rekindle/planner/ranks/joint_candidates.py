"""The options of a block, measured on every rank that runs it, as one menu for all.

Ranks that run the same ops in a block measure the same options. Others, as where an expert gets no
tokens on one of them, have options of their own that stand for the same: each keeps, recomputes or
moves results of the rank's own graph. Where such a block runs collectives, what is recomputed has
to be the same on all ranks: there a block is kept or recomputed as a whole.
"""

from dataclasses import dataclass

from rekindle.offload.offload_options import TierName
from rekindle.planner.candidates import deriving, keeping_saves, offloading, selecting, undominated
from rekindle.planner.measure.block_benchmark import Lone
from rekindle.planner.measure.plausible import at_least, plausible
from rekindle.planner.progress import each
from rekindle.planner.ranks.rank_sync import all_gather
from rekindle.planner.ranks.worst_case import worst_options
from rekindle.planner.trace.block_graph import Graph
from rekindle.planner.types import Option
from rekindle.report.op_words import named

_Menu = dict[str, Option]
"""Options by what they stand for, which has the same name on every rank."""


@dataclass(frozen=True)
class _Offer:
    """What one rank would measure of a block."""

    structure: str
    communicates: bool
    candidates: _Menu


def joint_menu(run: Lone | None, bytes_per_second: float, tier: TierName) -> tuple[Option, ...]:
    """The options of a block, each measured, without those that another is better than.

    All ranks call it at a time, without a `run` on those that have not run the block; their options
    are those of the first rank that has.
    """
    graph = None if run is None else run.graph()
    candidates = _candidates(run, graph)
    options: list[Option] = []
    if run is not None:
        options = [run.measured(option) for option in each(list(candidates.values()), "option")]
        options = plausible(options, run.timed_again)
    else:
        plausible([], lambda _: [])
    menu = dict(zip(candidates, options, strict=True))
    if bytes_per_second and run is not None and graph is not None:
        menu |= _moving(run, graph, menu, tier)
    if graph is not None:
        menu = {name: named(option, graph) for name, option in menu.items()}
    return tuple(undominated(_worst(menu)))


def _candidates(run: Lone | None, graph: Graph | None) -> _Menu:
    """What to measure on this rank; on all of them the same number of options, in one order."""
    from rekindle.planner.keep_sets import keep_sets  # needs scipy  # noqa: PLC0415

    offer = None
    if run is not None and graph is not None:
        derived = deriving(run.derivable(graph), graph)
        kept = [selecting(kept, graph) for kept in keep_sets(graph)]
        own = {"keep": Option("keep"), "recompute": Option("recompute")}
        own |= {f"derive {i}": option for i, option in enumerate(derived)}
        own |= {f"select {i}": option for i, option in enumerate(kept)}
        offer = _Offer(graph.structure(), graph.communicates, own)
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


def _worst(menu: _Menu) -> list[Option]:
    """The options that all ranks have measured, each with the most that any rank has."""
    menus = [other for other in all_gather(menu) if other]
    names = _common(menus)
    lists = [[other[name] for name in names] for other in menus]
    own = [(menu or menus[0])[name] for name in names]
    return worst_options(lists, own)


def _moving(run: Lone, graph: Graph, menu: _Menu, tier: TierName) -> _Menu:
    """Options that send away what others keep."""
    whole = at_least(run.measured(keeping_saves(graph)), menu["keep"])
    host = _host_of_a_move(run, whole, graph, tier)
    several = {"saves": whole} | {n: o for n, o in menu.items() if o.fate in ("derive", "select")}
    return {
        f"{name}, {i} away": less
        for name, option in several.items()
        for i, less in enumerate(offloading(option, graph, host, tier))
    }


def _host_of_a_move(run: Lone, whole: Option, graph: Graph, tier: TierName) -> tuple[float, float]:
    """Seconds that it takes the host to send a result away, and to bring it back."""
    moving = offloading(whole, graph, tier=tier)[:-1]  # the n-th moves n results, the last any
    if not whole.forward_host or not moving:
        return 0.0, 0.0
    moved = run.measured(moving[-1])
    count = max(len(moving) - _STAYING, 1)
    return (
        max(moved.forward_host - whole.forward_host, 0.0) / count,
        max(moved.backward_host - whole.backward_host, 0.0) / count,
    )


_STAYING = 2
"""Results that stay after all, because the backward wants them first."""
