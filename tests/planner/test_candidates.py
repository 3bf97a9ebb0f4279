"""Sets of results to keep, on real blocks: bytes held, ops replayed, gradients."""

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import rekindle
from benchmarks.decoder import Block as DecoderBlock
from benchmarks.decoder import Shape
from rekindle.planner.devices import device_named
from rekindle.planner.keep_sets import best_to_keep, keep_sets
from rekindle.planner.trace.block_trace import record
from rekindle.planner.types import BlockTrace
from rekindle.policies import Policy
from rekindle.regions.selective.decisions import Decision
from rekindle.regions.selective.planned_ops import policy_of
from rekindle.strategy import NumberedOps
from tests.planner.test_keep_sets import held, replayed, saved_bytes
from tests.toys import Block, same_bits

CPU = device_named("cpu")

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
    (kept,) = best_to_keep(graph, [nbytes])
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
        (kept,) = best_to_keep(graph, [int(share * saved_bytes(graph))])
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
