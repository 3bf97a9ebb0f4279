"""Which results of a block to keep: against every set there is, and on a real block."""

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import rekindle
from benchmarks.decoder import Block as DecoderBlock
from benchmarks.decoder import Shape
from rekindle.planner.devices import device_named
from rekindle.planner.trace.block_trace import record
from rekindle.planner.types import BlockTrace, TracedOp, TracedValue
from rekindle.policies import Policy
from rekindle.regions.selective.decisions import Decision
from rekindle.regions.selective.planned_ops import policy_of
from rekindle.strategy import NumberedOps
from tests.toys import Block, same_bits

pytest.importorskip("scipy")

from rekindle.planner.keep_sets import best_to_keep, keep_sets

CPU = device_named("cpu")
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
        kept = best_to_keep(graph, nbytes)
        assert kept is not None
        assert seconds(graph, kept) <= least_seconds(graph, nbytes) * (1 + GAP)


@every_graph
def test_no_set_that_holds_so_little_replays_in_less_time_where_ops_have_two_results(
    seed: int,
) -> None:
    graph = random_graph(seed)
    for share in SHARES:
        nbytes = int(share * saved_bytes(graph))
        kept = best_to_keep(graph, nbytes)
        assert kept is not None
        assert seconds(graph, kept) <= least_seconds(graph, nbytes) * (1 + GAP)


@every_graph
@pytest.mark.parametrize("results", [1, 2, 3])
def test_what_is_kept_holds_at_most_what_was_asked(seed: int, results: int) -> None:
    graph = random_graph(seed, results=results)
    for share in SHARES:
        nbytes = int(share * saved_bytes(graph))
        kept = best_to_keep(graph, nbytes)
        assert kept is not None
        assert held(graph, kept) <= nbytes


@every_graph
def test_with_room_for_all_that_is_saved_nothing_runs_again(seed: int) -> None:
    graph = random_graph(seed, results=1)
    kept = best_to_keep(graph, saved_bytes(graph))
    assert kept is not None
    assert not replayed(graph, kept)


@every_graph
def test_without_room_nothing_that_takes_any_is_kept(seed: int) -> None:
    assert best_to_keep(random_graph(seed), 0) == frozenset()


def test_what_cannot_be_made_again_does_not_count() -> None:
    ops = (TracedOp(0, "first", 1.0, (), (0,)), TracedOp(1, "second", 1.0, (1,), (2,)))
    values = (TracedValue(100, 0), TracedValue(10**9, None), TracedValue(100, 1))
    graph = BlockTrace(ops, values, frozenset({0, 1, 2}))
    assert best_to_keep(graph, 200) == frozenset({0, 1})


def test_a_small_value_that_much_is_made_from_is_kept_though_nobody_saves_it() -> None:
    """A chain whose waist is kept: its op is slow, and what follows is quick to make from it."""
    ops = (
        TracedOp(0, "slow", 1.0, (), (0,)),
        TracedOp(1, "wide", 0.001, (0,), (1,)),
        TracedOp(2, "wide too", 0.001, (0,), (2,)),
    )
    values = (TracedValue(10, 0), TracedValue(1000, 1), TracedValue(1000, 2))
    assert best_to_keep(BlockTrace(ops, values, frozenset({1, 2})), 10) == frozenset({0})


def test_a_graph_that_saves_nothing_keeps_nothing() -> None:
    graph = BlockTrace((TracedOp(0, "op", 1.0, (), (0,)),), (TracedValue(8, 0),), frozenset())
    assert all(not held(graph, kept) for kept in keep_sets(graph))


@every_graph
def test_each_set_of_a_menu_is_there_once_and_holds_less_than_all(seed: int) -> None:
    graph = random_graph(seed, results=1)
    sets = keep_sets(graph)
    assert len(set(sets)) == len(sets)
    assert all(held(graph, kept) <= 0.75 * saved_bytes(graph) for kept in sets)


SHAPE = Shape("test", dim=32, ffn=96, heads=4, kv_heads=2, layers=1, batch=2, tokens=32)


def decoder_block() -> tuple[nn.Module, Tensor]:
    return DecoderBlock(SHAPE, dtype=torch.float32), SHAPE.hidden_states(dtype=torch.float32)


def block_with_dropout() -> tuple[nn.Module, Tensor]:
    return Block(16, drop=0.2), torch.randn(64, 16)


def torch_layer() -> tuple[nn.Module, Tensor]:
    return nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True), torch.randn(2, 16, 32)


BLOCKS = {"decoder": decoder_block, "dropout": block_with_dropout, "nn.Transformer": torch_layer}
every_block = pytest.mark.parametrize("build", BLOCKS.values(), ids=BLOCKS)


def step(block: nn.Module, x: Tensor) -> list[Tensor | None]:
    torch.manual_seed(0)
    block.zero_grad()
    given = x.detach().requires_grad_()
    block(given).square().sum().backward()
    return [given.grad, *(p.grad for p in block.parameters())]


def graph_of(block: nn.Module, x: Tensor) -> BlockTrace:
    given = x.detach().requires_grad_()
    return record(lambda: block(given), CPU)


def seen_with(block: nn.Module, x: Tensor, kept: frozenset[int]) -> rekindle.Counts:
    rekindle.apply(block, {"": policy_of(NumberedOps(tuple(kept)))})
    try:
        with rekindle.observe() as seen:
            step(block, x)
    finally:
        rekindle.remove(block)
    return seen.total


def extra_held(block: nn.Module, x: Tensor, kept: frozenset[int]) -> int:
    """Bytes held above those of a region that keeps nothing: its inputs, and what must be held."""
    nothing: frozenset[int] = frozenset()
    return seen_with(block, x, kept).bytes_held - seen_with(block, x, nothing).bytes_held


@every_block
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
def test_a_real_block_holds_at_most_what_was_asked(build: object, share: float) -> None:
    block, x = build()  # type: ignore[operator]
    graph = graph_of(block, x)
    nbytes = int(share * saved_bytes(graph))
    kept = best_to_keep(graph, nbytes)
    assert kept is not None
    assert extra_held(block, x, kept) <= nbytes


@pytest.mark.parametrize("build", [decoder_block, block_with_dropout])
def test_a_real_block_holds_what_its_graph_says(build: object) -> None:
    block, x = build()  # type: ignore[operator]
    graph = graph_of(block, x)
    for kept in keep_sets(graph):
        assert extra_held(block, x, kept) == held(graph, kept)


@every_block
def test_a_real_block_replays_what_its_graph_says_and_views(build: object) -> None:
    block, x = build()  # type: ignore[operator]
    graph = graph_of(block, x)
    views = seen_with(block, x, frozenset(op.number for op in graph.ops)).ops_replayed
    for kept in keep_sets(graph):
        counts = seen_with(block, x, kept)
        assert counts.replays == 1
        needed = len(replayed(graph, kept))
        assert needed <= counts.ops_replayed <= needed + views + _views(graph)


def _views(graph: BlockTrace) -> int:
    """Ops that are in no graph: numbers that are missing."""
    return max(op.number for op in graph.ops) + 1 - len(graph.ops)


@every_block
def test_a_real_block_that_keeps_less_replays_more(build: object) -> None:
    block, x = build()  # type: ignore[operator]
    graph = graph_of(block, x)
    shares = (1.0, 0.5, 0.0)
    counts = []
    for share in shares:
        kept = best_to_keep(graph, int(share * saved_bytes(graph)))
        assert kept is not None
        counts.append(seen_with(block, x, kept).ops_replayed)
    assert counts[0] < counts[1] < counts[2]


@every_block
def test_every_set_of_a_real_block_gives_the_same_gradients(build: object) -> None:
    block, x = build()  # type: ignore[operator]
    plain = [None if g is None else g.clone() for g in step(block, x)]
    for kept in keep_sets(graph_of(block, x)):
        rekindle.apply(block, {"": policy_of(NumberedOps(tuple(kept)))})
        assert all(itertools.starmap(same_bits, zip(plain, step(block, x), strict=True)))
        rekindle.remove(block)


@dataclass(eq=False, frozen=True)
class Listening(Policy):
    """Recomputes everything, and notes which op has which number."""

    told: dict[int, str] = field(default_factory=dict)

    def decide(self, ctx: rekindle.SelectiveCheckpointContext) -> Decision | None:
        self.told.setdefault(ctx.number, ctx.op.name())
        return Decision.RECOMPUTE


@every_block
def test_ops_have_the_numbers_that_a_policy_is_told(build: object) -> None:
    block, x = build()  # type: ignore[operator]
    policy = Listening()
    rekindle.apply(block, {"": policy})
    step(block, x)
    rekindle.remove(block)
    graph = graph_of(block, x)
    assert graph.ops
    assert {op.number: op.name for op in graph.ops}.items() <= policy.told.items()
