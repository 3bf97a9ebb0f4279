"""The options of a block that are worth having."""

from dataclasses import replace

from rekindle.offload.offload_options import TierName
from rekindle.planner.trace.block_graph import Graph
from rekindle.planner.types import Option
from rekindle.strategy import OpAddress


def deriving(derivable: tuple[int, ...], graph: Graph) -> list[Option]:
    """To make again all that one op gives back, or the large ones of it alone."""
    sizes = {n: graph.values[v].nbytes for n in derivable if (v := graph.saves[n]) is not None}
    large = tuple(n for n, nbytes in sizes.items() if 2 * nbytes >= max(sizes.values()))
    sets = dict.fromkeys((large, derivable))
    return [keeping_saves(graph, numbers) for numbers in sets if numbers]


def keeping_saves(graph: Graph, derived: tuple[int, ...] = ()) -> Option:
    """To keep what autograd saves, but for what one op gives back."""
    return Option("derive", derived=derived, saves=len(graph.saves))


def selecting(kept: frozenset[int], graph: Graph) -> Option:
    """To keep the results of some ops, and make the others again."""
    return addressed(Option("select", tuple(sorted(kept))), graph)


def addressed(option: Option, graph: Graph) -> Option:
    """An option that goes op by op, with the addresses of its ops."""
    if option.fate != "select":
        return option
    known = {op.number: op.address for op in graph.ops}

    def addresses(numbers: tuple[int, ...]) -> tuple[OpAddress, ...]:
        return tuple(address for n in numbers if (address := known.get(n)) is not None)

    return replace(
        option,
        kept_ops=addresses(option.kept),
        offloaded_ops=addresses(option.offloaded),
    )


def offloading(
    option: Option,
    graph: Graph,
    host_seconds: tuple[float, float] = (0.0, 0.0),
    tier: TierName = "host",
) -> list[Option]:
    """The same with some of what is kept sent away: the largest, and so on to all.

    Time is that of the option, with what each result takes the host, out and back. Whether the link
    keeps up is seen when blocks are put together.
    """
    sizes = _by_save(option, graph) if option.fate == "derive" else _by_op(option, graph)
    worth = max(sum(sizes.values()) // 100, 1)
    largest = sorted((n for n, nbytes in sizes.items() if nbytes >= worth), key=lambda n: -sizes[n])
    found = []
    for count in range(1, len(largest) + 1):
        away = [number for numbers in largest[:count] for number in numbers]
        moved = sum(sizes[numbers] for numbers in largest[:count])
        moving = replace(
            option,
            kept=tuple(number for number in option.kept if number not in away),
            offloaded=tuple(sorted(away)),
            bytes_held=max(option.bytes_held - moved, 0),
            bytes_moved=moved,
            backward_peak=option.backward_peak + moved,
            forward_host=option.forward_host + count * host_seconds[0],
            backward_host=option.backward_host + count * host_seconds[1],
            largest_moved=sizes[largest[0]],
            tier=tier,
        )
        found.append(addressed(moving, graph))
    return [] if not found else [*found[:_MOVES], *([found[-1]] if len(found) > _MOVES else [])]


def _by_op(option: Option, graph: Graph) -> dict[tuple[int, ...], int]:
    """The results that an option keeps, by the number of their op, with what is saved of them."""
    return {
        (op.number,): sum(graph.values[v].nbytes for v in op.outputs if v in graph.saved)
        for op in graph.ops
        if op.number in option.kept and not any(graph.values[v].changes for v in op.outputs)
    }


def _by_save(option: Option, graph: Graph) -> dict[tuple[int, ...], int]:
    """The results that an option keeps, by their numbers among what is saved."""
    numbers: dict[int, list[int]] = {}
    for number, v in enumerate(graph.saves):
        if v is not None and graph.values[v].maker is not None and not graph.values[v].changes:
            numbers.setdefault(v, []).append(number)
    return {
        tuple(found): graph.values[v].nbytes
        for v, found in numbers.items()
        if not set(found) & set(option.derived)
    }


_MOVES = 6
"""How many of the largest results are sent away one by one, before all of them are."""


def with_casts(options: tuple[Option, ...]) -> tuple[Option, ...]:
    """A block's options, each with the casts of weights that it holds itself.

    Where all is recomputed, only autocast's cache holds casts: what it holds then is all of them.
    """
    casts = max(option.casts_cached for option in options)
    return tuple(replace(option, casts_held=casts - option.casts_cached) for option in options)


def undominated(options: list[Option]) -> list[Option]:
    """The options without those that another of the same kind makes pointless.

    Note [What may be pruned]. Seconds are noisy and bytes are not. So an option goes only if
    another one of its kind takes no more bytes of any sort and is faster by more than both
    measurements are uncertain; of several that take exactly the same bytes, the fastest stays.
    Then, whatever the clock said, for each option that was measured one is left that needs no more
    memory: the least budget of a profile depends on bytes alone. Kinds are apart because plans are
    made without offload, too, and without going op by op: such a plan finds all of its options.
    """
    ranks = [(option.seconds, place) for place, option in enumerate(options)]
    return [
        option
        for option, rank in zip(options, ranks, strict=True)
        if option.fate in ("keep", "recompute")
        or not any(
            _kind(other) == _kind(option)
            and (other_rank < rank if _sizes(other) == _sizes(option) else _beats(other, option))
            for other, other_rank in zip(options, ranks, strict=True)
        )
    ]


def _kind(option: Option) -> tuple[str, bool, TierName]:
    return option.fate, option.bytes_moved > 0, option.tier


def _beats(other: Option, option: Option) -> bool:
    """Whether one takes no more bytes than another, and less time beyond doubt."""
    if any(theirs > own for theirs, own in zip(_sizes(other), _sizes(option), strict=True)):
        return False
    noise = other.seconds_noise + option.seconds_noise
    gains = [own - theirs for theirs, own in zip(_times(other), _times(option), strict=True)]
    return max(gains) > noise and min(gains) >= -noise


def _sizes(option: Option) -> tuple[int, ...]:
    """All bytes that decide how much memory a step by the option needs."""
    least_held = option.bytes_held - option.input_let_go
    moved = option.bytes_moved, option.largest_moved
    held = option.bytes_held, least_held, option.bytes_held + option.casts_cached
    return *held, *moved, option.forward_peak, option.backward_peak


def _times(option: Option) -> tuple[float, float]:
    """Seconds of the device, and of the host."""
    return (
        option.forward_seconds + option.backward_seconds,
        option.forward_host + option.backward_host,
    )
