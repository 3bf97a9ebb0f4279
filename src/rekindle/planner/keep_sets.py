"""Which activations of a block to keep: sets worth having, by integer programming.

For a number of bytes that may be held, what to hold so that the least time goes into making the
rest again. Every value that backward needs is held, or made by its op from values that are held or
made in turn. HiGHS solves it to optimality: blocks have tens of ops. (The problem is that of Jain
et al., "Checkmate", 2020, for one block, without a schedule: a value is made at most once.)
"""

from collections.abc import Iterable

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from rekindle.planner.types import BlockTrace

_LEVELS = (0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Shares of what plain autograd holds."""


def keep_sets(graph: BlockTrace) -> list[frozenset[int]]:
    """Numbers of ops whose results are kept, from many to few; each set once."""
    saved = sum(graph.values[v].nbytes for v in graph.saved)
    found: dict[frozenset[int], None] = {}
    for share in _LEVELS:
        kept = best_to_keep(graph, int(share * saved))
        if kept is not None:
            found[kept] = None
    return list(found)


def best_to_keep(graph: BlockTrace, nbytes: int) -> frozenset[int] | None:
    """The ops to keep the results of, so that at most so many bytes are held; None if none do.

    What cannot be made again is held in any case, and does not count.
    """
    values, ops = graph.values, graph.ops
    count = len(ops)
    keep, again, held = 0, count, 2 * count  # of each op, of each op, of each value
    columns = 2 * count + len(values)
    entries: list[tuple[int, int, float]] = []
    lower: list[float] = []

    def row(least: float, *terms: tuple[int, float]) -> None:
        entries.extend((len(lower), column, factor) for column, factor in terms)
        lower.append(least)

    for v, maker, user in _needs(graph):
        made = (keep + maker, 1.0), (again + maker, 1.0)
        if user is None:
            row(1, *made)
            row(0, (held + v, 1.0), (keep + maker, -1.0))
        else:
            row(0, *made, (again + user, -1.0))
            row(-1, (held + v, 1.0), (keep + maker, -1.0), (again + user, -1.0))
    row(-nbytes, *((held + v, -float(value.nbytes)) for v, value in enumerate(values)))
    cost = np.zeros(columns)
    cost[again : again + count] = [1e9 * op.seconds + 100 for op in ops]  # 1e-6 is nothing to HiGHS
    cost[keep : keep + count] = 1.0  # nothing is kept in vain
    rows, cols, factors = zip(*entries, strict=True)
    result = milp(
        cost,
        constraints=LinearConstraint(
            coo_array((factors, (rows, cols)), shape=(len(lower), columns)).tocsr(), lower, np.inf
        ),
        integrality=np.concatenate([np.ones(2 * count), np.zeros(len(values))]),
        bounds=Bounds(0, 1),
    )
    if result.x is None:
        return None
    return frozenset(op.number for i, op in enumerate(ops) if result.x[keep + i] > 0.5)


def _needs(graph: BlockTrace) -> Iterable[tuple[int, int, int | None]]:
    """Values that can be made again, by whom, and for whom: an op, or None for backward."""
    for v in sorted(graph.saved):
        maker = graph.values[v].maker
        if maker is not None:
            yield v, maker, None
    for user, op in enumerate(graph.ops):
        for v in sorted(set(op.inputs)):
            maker = graph.values[v].maker
            if maker is not None:
                yield v, maker, user
