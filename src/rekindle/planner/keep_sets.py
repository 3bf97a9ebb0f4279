"""Which results of a block to keep: for a number of bytes, those that leave the least to replay.

Every value that backward needs is kept, or its op is replayed from values that are kept or replayed
in turn: the problem of Jain et al., "Checkmate" (2020), for one block, without a schedule, where
each op is replayed at most once.

It is solved exactly by dynamic programming over the ops, from the last to the first. When it is an
op's turn, all ops that use its results have been decided, so it is known which results are needed:
those that autograd saves, and those that a replayed op is given. The state is the set of needed
results that autograd does not save and whose ops are still to come, which is small because autograd
saves most of what several ops use. Each state has a front: the fewest nanoseconds of replay for
each number of bytes. One run gives the sets for all sizes.

Not always the best are sets of blocks where a front outgrows `MAX_FRONT`, so that points with about
the same bytes are merged, or where there are more than `MAX_STATES`: tens of results that autograd
does not save, each used far from where it is made. They hold what they say all the same.
"""

from bisect import bisect_right

from rekindle.planner.types import BlockTrace, TracedOp

LEVELS = (0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Shares of the bytes that plain autograd holds."""
MAX_FRONT = 1024
"""Points that a front may have before some are merged."""
MAX_STATES = 512
"""States that are followed: of more, those that leave least to replay or hold least."""
_REPLAY_OVERHEAD = 100.0
"""Nanoseconds that each replayed op costs on top of its estimate: of equals, fewer are replayed."""
_KEEP_OVERHEAD = 1.0
"""Nanoseconds that each kept op costs: none is kept in vain."""

_Point = tuple[int, float, int]
"""Bytes held, nanoseconds of replay, and the kept ops as bits, by index."""


def keep_sets(trace: BlockTrace) -> list[frozenset[int]]:
    """Numbers of ops whose results are kept, from many to few; each set once.

    Values that no op can make again are held in any case, and do not count.
    """
    sizes = [int(share * trace.saved_bytes) for share in LEVELS]
    return list(dict.fromkeys(best_to_keep(trace, sizes)))


def best_to_keep(trace: BlockTrace, sizes: list[int]) -> list[frozenset[int]]:
    """For each size, the ops to keep the results of so that at most so many bytes are held."""
    front = _front(trace, max(sizes))
    held = [nbytes for nbytes, _, _ in front]
    found = []
    for size in sizes:
        _, _, kept = front[bisect_right(held, size) - 1]
        found.append(frozenset(op.number for i, op in enumerate(trace.ops) if kept >> i & 1))
    return found


def _front(trace: BlockTrace, most: int) -> list[_Point]:
    """The sets that hold at most so many bytes and leave least to replay: bytes go up, time down.

    The first holds nothing: with everything replayed, nothing is held.
    """
    states: dict[int, list[_Point]] = {0: [(0, 0.0, 0)]}
    for index in range(len(trace.ops) - 1, -1, -1):
        op = trace.ops[index]
        after: dict[int, list[list[_Point]]] = {}
        own = sum(1 << v for v in op.outputs)
        given = _unsaved_inputs(op, trace)
        replay = 1e9 * op.seconds + _REPLAY_OVERHEAD
        for needed, front in states.items():
            held = sum(
                trace.values[v].nbytes for v in op.outputs if v in trace.saved or needed >> v & 1
            )
            others = needed & ~own
            if not needed & own and not trace.saved.intersection(op.outputs):
                after.setdefault(others, []).append(front)
                continue
            after.setdefault(others | given, []).append(
                [(nbytes, seconds + replay, kept) for nbytes, seconds, kept in front]
            )
            after.setdefault(others, []).append(
                [
                    (nbytes + held, seconds + _KEEP_OVERHEAD, kept | 1 << index)
                    for nbytes, seconds, kept in front
                    if nbytes + held <= most
                ]
            )
        states = _fewer({needed: _merged(fronts, most) for needed, fronts in after.items()})
    return _merged(list(states.values()), most)


def _fewer(states: dict[int, list[_Point]]) -> dict[int, list[_Point]]:
    """At most `MAX_STATES` of the states that have any points."""
    states = {needed: front for needed, front in states.items() if front}
    if len(states) <= MAX_STATES:
        return states
    quickest = sorted(states, key=lambda needed: states[needed][-1][1])[: MAX_STATES // 2]
    leanest = sorted(states, key=lambda needed: states[needed][0])[: MAX_STATES // 2]
    return {needed: states[needed] for needed in {*quickest, *leanest}}


def _unsaved_inputs(op: TracedOp, trace: BlockTrace) -> int:
    """The values, as bits, that a replay of an op needs made, and that autograd does not save."""
    return sum(
        1 << v for v in set(op.inputs) if v not in trace.saved and trace.values[v].maker is not None
    )


def _merged(fronts: list[list[_Point]], most: int) -> list[_Point]:
    """One front of several: points that hold fewer bytes than all that leave less to replay."""
    points = fronts[0] if len(fronts) == 1 else sorted(p for front in fronts for p in front)
    found: list[_Point] = []
    least = float("inf")
    for point in points:
        if point[1] < least:
            found.append(point)
            least = point[1]
    if len(found) <= MAX_FRONT:
        return found
    width = most // MAX_FRONT + 1
    last_of = {point[0] // width: point for point in found}  # of a bucket, the least to replay
    return [found[0], *(point for point in last_of.values() if point is not found[0])]
