"""The options of a block that are worth having."""

from dataclasses import replace

from rekindle.budget.graph import Graph
from rekindle.budget.values import Option


def makers(graph: Graph) -> set[int]:
    """The ops that make what backward needs, by their index."""
    makers = {graph.values[v].maker for v in graph.saved}
    return {maker for maker in makers if maker is not None}


def offloading(option: Option, graph: Graph) -> list[Option]:
    """The same with some of what is kept sent to host memory: the largest, and so on to all.

    Time is that of the option: whether the link keeps up is seen when blocks are put together.
    """
    sizes: dict[int, int] = {}
    for op in graph.ops:
        if op.number in option.kept and not any(graph.values[v].changes for v in op.outputs):
            sizes[op.number] = sum(graph.values[v].nbytes for v in op.outputs if v in graph.saved)
    worth = max(sum(sizes.values()) // 100, 1)
    largest = sorted((n for n, nbytes in sizes.items() if nbytes >= worth), key=lambda n: -sizes[n])
    found = []
    for count in range(1, len(largest) + 1):
        away = largest[:count]
        moved = sum(sizes[number] for number in away)
        found.append(
            replace(
                option,
                kept=tuple(number for number in option.kept if number not in away),
                offloaded=tuple(sorted(away)),
                bytes_held=max(option.bytes_held - moved, 0),
                bytes_moved=moved,
                backward_peak=option.backward_peak + moved,
            )
        )
    return [] if not found else [*found[:_MOVES], *([found[-1]] if len(found) > _MOVES else [])]


_MOVES = 6
"""How many of the largest results are sent away one by one, before all of them are."""


def undominated(options: list[Option]) -> list[Option]:
    """Without options that hold, move and take as much as another or more."""

    def costs(option: Option) -> tuple[float, ...]:
        peaks = option.forward_peak, option.backward_peak
        return option.bytes_held, option.bytes_moved, option.seconds, *peaks

    return [
        option
        for i, option in enumerate(options)
        if not any(
            all(map(float.__le__, map(float, costs(other)), map(float, costs(option))))
            and (costs(other) != costs(option) or j < i)
            for j, other in enumerate(options)
            if j != i
        )
        or option.fate != "select"
    ]
