"""Which results of a block to keep: against every set there is."""

import itertools
import random
from collections.abc import Iterable

import pytest

from rekindle.planner import keep_sets as module
from rekindle.planner.keep_sets import best_to_keep, keep_sets
from rekindle.planner.types import BlockTrace, TracedOp, TracedValue

GAP = 1e-3


def random_graph(seed: int, *, ops: int = 8, second: float = 1e-3, results: int = 2) -> BlockTrace:
    """Ops with one result or more, each from what was made before; some results cannot be made."""
    draw = random.Random(seed)
    values: list[TracedValue] = []
    made: list[TracedOp] = []
    for index in range(ops):
        inputs = draw.sample(range(len(values)), min(len(values), draw.randrange(3)))
        outputs = range(len(values), len(values) + draw.randint(1, results))
        values += [TracedValue(draw.choice([10, 40, 400, 1000]) * 4096, index) for _ in outputs]
        taken = second * draw.uniform(0.1, 1)
        made.append(TracedOp(2 * index, f"op {index}", taken, tuple(inputs), tuple(outputs)))
        if draw.random() < 0.15:
            values.append(TracedValue(4096, None))
    saved = [v for v in range(len(values)) if draw.random() < 0.6]
    return BlockTrace(tuple(made), tuple(values), frozenset(saved))


def replayed(graph: BlockTrace, kept: Iterable[int]) -> set[int]:
    """The ops, by index, that run again where some, by number, keep their results."""
    stays = {index for index, op in enumerate(graph.ops) if op.number in set(kept)}
    needed = list(graph.saved)
    again: set[int] = set()
    while needed:
        maker = graph.values[needed.pop()].maker
        if maker is not None and maker not in stays and maker not in again:
            again.add(maker)
            needed += graph.ops[maker].inputs
    return again


def held(graph: BlockTrace, kept: Iterable[int]) -> int:
    """Bytes of what is kept and of use: saved, or given to an op that runs again."""
    kept = set(kept)
    given = {v for index in replayed(graph, kept) for v in graph.ops[index].inputs}
    return sum(
        graph.values[v].nbytes
        for op in graph.ops
        if op.number in kept
        for v in op.outputs
        if v in graph.saved or v in given
    )


def seconds(graph: BlockTrace, kept: Iterable[int]) -> float:
    return sum(graph.ops[index].seconds for index in replayed(graph, kept))


def least_seconds(graph: BlockTrace, nbytes: int) -> float:
    numbers = [op.number for op in graph.ops]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(numbers, count) for count in range(len(numbers) + 1)
    )
    return min(seconds(graph, kept) for kept in subsets if held(graph, kept) <= nbytes)


def saved_bytes(graph: BlockTrace) -> int:
    return sum(graph.values[v].nbytes for v in graph.saved)


every_graph = pytest.mark.parametrize("seed", range(10))
SHARES = (0.0, 0.2, 0.5, 0.8, 1.0)
SECONDS = {"a large block": 1e-2, "a usual block": 1e-4, "a small block": 3e-6}


@every_graph
@pytest.mark.parametrize("second", SECONDS.values(), ids=SECONDS)
def test_no_set_that_holds_so_little_replays_in_less_time(seed: int, second: float) -> None:
    graph = random_graph(seed, second=second, results=1)
    for share in SHARES:
        nbytes = int(share * saved_bytes(graph))
        (kept,) = best_to_keep(graph, [nbytes])
        assert seconds(graph, kept) <= least_seconds(graph, nbytes) * (1 + GAP)


@every_graph
def test_no_set_that_holds_so_little_replays_in_less_time_where_ops_have_two_results(
    seed: int,
) -> None:
    graph = random_graph(seed)
    for share in SHARES:
        nbytes = int(share * saved_bytes(graph))
        (kept,) = best_to_keep(graph, [nbytes])
        assert seconds(graph, kept) <= least_seconds(graph, nbytes) * (1 + GAP)


@every_graph
@pytest.mark.parametrize("results", [1, 2, 3])
def test_what_is_kept_holds_at_most_what_was_asked(seed: int, results: int) -> None:
    graph = random_graph(seed, results=results)
    for share in SHARES:
        nbytes = int(share * saved_bytes(graph))
        (kept,) = best_to_keep(graph, [nbytes])
        assert held(graph, kept) <= nbytes


@every_graph
def test_with_room_for_all_that_is_saved_nothing_runs_again(seed: int) -> None:
    graph = random_graph(seed, results=1)
    (kept,) = best_to_keep(graph, [saved_bytes(graph)])
    assert not replayed(graph, kept)


@every_graph
def test_without_room_nothing_that_takes_any_is_kept(seed: int) -> None:
    assert best_to_keep(random_graph(seed), [0]) == [frozenset()]


def test_what_cannot_be_made_again_does_not_count() -> None:
    ops = (TracedOp(0, "first", 1.0, (), (0,)), TracedOp(1, "second", 1.0, (1,), (2,)))
    values = (TracedValue(100, 0), TracedValue(10**9, None), TracedValue(100, 1))
    graph = BlockTrace(ops, values, frozenset({0, 1, 2}))
    assert best_to_keep(graph, [200]) == [frozenset({0, 1})]


def test_a_small_value_that_much_is_made_from_is_kept_though_nobody_saves_it() -> None:
    """A chain whose waist is kept: its op is slow, and what follows is quick to make from it."""
    ops = (
        TracedOp(0, "slow", 1.0, (), (0,)),
        TracedOp(1, "wide", 0.001, (0,), (1,)),
        TracedOp(2, "wide too", 0.001, (0,), (2,)),
    )
    values = (TracedValue(10, 0), TracedValue(1000, 1), TracedValue(1000, 2))
    assert best_to_keep(BlockTrace(ops, values, frozenset({1, 2})), [10]) == [frozenset({0})]


def test_a_graph_that_saves_nothing_keeps_nothing() -> None:
    graph = BlockTrace((TracedOp(0, "op", 1.0, (), (0,)),), (TracedValue(8, 0),), frozenset())
    assert all(not held(graph, kept) for kept in keep_sets(graph))


@every_graph
def test_each_set_of_a_menu_is_there_once_and_holds_less_than_all(seed: int) -> None:
    graph = random_graph(seed, results=1)
    sets = keep_sets(graph)
    assert len(set(sets)) == len(sets)
    assert all(held(graph, kept) <= 0.75 * saved_bytes(graph) for kept in sets)


def test_many_sizes_are_as_good_as_one_at_a_time() -> None:
    graph = random_graph(3, ops=20)
    sizes = [int(share * saved_bytes(graph)) for share in SHARES]
    alone = [best_to_keep(graph, [size])[0] for size in sizes]
    found = best_to_keep(graph, sizes)
    assert [seconds(graph, kept) for kept in found] == [seconds(graph, kept) for kept in alone]


@every_graph
def test_with_few_points_and_states_sets_still_hold_what_was_asked(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FRONT", 4)
    monkeypatch.setattr(module, "MAX_STATES", 4)
    graph = random_graph(seed, ops=24)
    sizes = [int(share * saved_bytes(graph)) for share in SHARES]
    for size, kept in zip(sizes, best_to_keep(graph, sizes), strict=True):
        assert held(graph, kept) <= size
