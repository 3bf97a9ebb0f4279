"""Looking at a block's forward leaves nothing behind, and holds no more than a plain forward."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.decoder import Block as DecoderBlock
from benchmarks.decoder import Shape
from rekindle.planner.devices import device_named
from rekindle.planner.instruments.memory_meter import LiveBytes
from rekindle.planner.trace.block_trace import record
from rekindle.regions.saved_indices import recomputable_indices
from tests.toys import Block

CPU = device_named("cpu")
SHAPE = Shape("test", dim=32, ffn=96, heads=4, kv_heads=2, layers=1, batch=2, tokens=32)


class SavesItsOutputs(nn.Module):
    """Ops whose nodes save what they made: `exp`, `softmax`, `sigmoid`, `tanh`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).exp().softmax(-1).sigmoid().tanh()


class FreesEarly(nn.Module):
    """Large results that nobody saves come and go: their addresses are used again."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + (x.detach() * 2).sum() + 1
        return x * x


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "saves its outputs": SavesItsOutputs,
    "frees early": FreesEarly,
    "decoder": lambda: DecoderBlock(SHAPE, dtype=torch.float32),
    "dropout": lambda: Block(32, drop=0.2),
    "nn.Transformer": lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True),
    "in place": lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 32)),
}
every_block = pytest.mark.parametrize("build", BLOCKS.values(), ids=BLOCKS)

LOOKS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "record": lambda block, x: record(lambda: block(x), CPU, block),
    "derivable": lambda block, x: recomputable_indices(lambda: block(x), 50),
}
every_look = pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def used(function: Callable[[], Any], block: nn.Module, x: Tensor) -> tuple[int, int]:
    """Bytes that are left after a call, and at its peak."""
    with LiveBytes([*block.parameters(), *block.buffers(), x]) as live:
        function()
        return live.now(), live.peak()


@every_block
@every_look
@pytest.mark.usefixtures("no_collector")
def test_what_looks_at_a_forward_leaves_nothing_and_holds_what_a_plain_one_does(
    look: Callable[[nn.Module, Tensor], Any], build: Callable[[], nn.Module]
) -> None:
    block, x = build(), torch.randn(2, 32, 32, requires_grad=True)

    def plain() -> None:
        block(x)

    plain()
    look(block, x)
    _, peak = used(plain, block, x)
    left, looking = used(lambda: look(block, x), block, x)
    assert left == 0
    assert looking <= peak + (0 if look is LOOKS["record"] else x.nbytes)  # it compares results


@every_look
@pytest.mark.usefixtures("no_collector")
def test_a_forward_that_fails_half_way_leaves_nothing(
    look: Callable[[nn.Module, Tensor], Any],
) -> None:
    class Fails(SavesItsOutputs):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyboardInterrupt

    block, x = Fails(), torch.randn(2, 32, 32, requires_grad=True)

    def attempt() -> None:
        with pytest.raises(KeyboardInterrupt):
            look(block, x)

    attempt()
    gc.collect()
    with LiveBytes([*block.parameters(), x]) as live:
        attempt()
        gc.collect()  # the traceback's own cycles
        assert live.now() == 0


def test_an_address_that_is_used_again_is_another_value() -> None:
    """Without that, what a dead result's memory is used for would pass for that result."""
    block, x = FreesEarly(), torch.randn(64, 64, requires_grad=True)
    graph = record(lambda: block(x), CPU)
    made = [v for op in graph.ops for v in op.outputs]
    assert len(made) == len(set(made)) == len(graph.ops)


def test_results_of_parameters_alone_count_as_coming_from_outside() -> None:
    class OfWeights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.double().exp().t()).relu()

    x = torch.randn(4, 32, dtype=torch.double, requires_grad=True)
    block = OfWeights()
    graph = record(lambda: block(x), CPU, block)
    assert [op.name for op in graph.ops] == ["aten::mm", "aten::relu"]
    # Saved: by `exp` its output, by `mm` x and that output, by `relu` its output.
    assert sorted(graph.saved_tensors, key=str) == [1, None, None, None]
