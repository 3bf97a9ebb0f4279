"""Which activations of a block to keep: sets worth having, by integer programming.

For a number of bytes that may be held, what to hold so that the least time goes into making the
rest again. Every value that backward needs is held, or made by its op from values that are held or
made in turn. HiGHS solves it to optimality: blocks have tens of ops. (The problem is that of Jain
et al., "Checkmate", 2020, for one block, without a schedule: a value is made at most once.)
"""

from collections.abc import Iterable

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from rekindle.budget.graph import Graph

_LEVELS = (0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Shares of what plain autograd holds."""


def keep_sets(graph: Graph) -> list[frozenset[int]]:
    """Numbers of ops whose results are kept, from many to few; each set once."""
    saved = sum(graph.values[v].nbytes for v in graph.saved)
    found: dict[frozenset[int], None] = {}
    for share in _LEVELS:
        kept = best_to_keep(graph, int(share * saved))
        if kept is not None:
            found[kept] = None
    return list(found)


def best_to_keep(graph: Graph, nbytes: int) -> frozenset[int] | None:
    """The ops to keep the results of, so that at most so many bytes are held; None if none do.

    What cannot be made again is held in any case, and does not count.
    """
    values, ops = graph.values, graph.ops
    free = [v for v, value in enumerate(values) if value.maker is not None]
    held = {v: i for i, v in enumerate(free)}
    count = len(free) + len(ops)
    cost = np.zeros(count)
    cost[len(free) :] = [op.seconds + 1e-7 for op in ops]
    size = np.zeros(count)
    size[: len(free)] = [values[v].nbytes for v in free]
    rows = list(_needs(graph, held))
    matrix = lil_array((len(rows) + 1, count))
    lower = np.zeros(len(rows) + 1)
    for i, (op, value, need) in enumerate(rows):
        matrix[i, held[value]] = 1
        maker = values[value].maker
        assert maker is not None, "others are not among the rows"
        matrix[i, len(free) + maker] += 1
        if op is not None:
            matrix[i, len(free) + op] -= 1
        lower[i] = need
    matrix[len(rows), :] = -size
    lower[len(rows)] = -nbytes
    result = milp(
        cost,
        constraints=LinearConstraint(matrix.tocsr(), lower, np.inf),
        integrality=np.ones(count),
        bounds=Bounds(0, 1),
    )
    if result.x is None:
        return None
    chosen = [v for v in free if result.x[held[v]] > 0.5]
    makers = {values[v].maker for v in chosen}
    return frozenset(ops[m].number for m in makers if m is not None)


def _needs(graph: Graph, held: dict[int, int]) -> Iterable[tuple[int | None, int, int]]:
    """Rows: who needs a value (an op that is run again, or None for backward), which, how much."""
    for value in sorted(graph.saved):
        if value in held:
            yield None, value, 1
    for index, op in enumerate(graph.ops):
        for value in set(op.inputs):
            if value in held:
                yield index, value, 0
