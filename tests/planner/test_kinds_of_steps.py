"""Steps that skip blocks, do not repeat themselves, or pass unusual containers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.toys import Block

pytest.importorskip("scipy")


class Skipping(nn.Module):
    """Skips blocks at random while it trains, as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Block(16, 0.1) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.4:
                x = layer(x)
        return x.square().mean()


@pytest.fixture(params=range(4))
def seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(request.param)
    return


@pytest.mark.usefixtures("seeded")
def test_blocks_that_are_skipped_at_random_are_planned_for_what_ran() -> None:
    model, x = Skipping(), torch.randn(64, 16)
    state = torch.get_rng_state()
    plan = rekindle.fit(model, x, "80%")
    assert {path for path, _, _ in plan.blocks} | set(plan.unused) == {
        f"layers.{i}" for i in range(6)
    }
    assert torch.equal(torch.get_rng_state(), state)
    with rekindle.observe() as seen:
        for _ in range(8):
            model(x).backward()
    assert seen.total.forwards > 0
    rekindle.remove(model)


def test_blocks_that_the_planned_step_skipped_are_recomputed_when_they_run() -> None:
    model, x = Skipping(), torch.randn(64, 16)
    plan = rekindle.fit(model, x, "70%")
    skipped = {path: model.get_submodule(path) for path in plan.unused}
    assert skipped
    with rekindle.observe() as seen:
        next(iter(skipped.values()))(torch.randn(4, 16)).sum().backward()
    assert seen.total.replays == 1


class Unsteady(nn.Module):
    """Runs one block more each time: it does not repeat itself, whatever the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(9))
        self._calls = iter(range(2, 9))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: next(self._calls)]:
            x = block(x)
        return x.sum()


def test_a_step_that_does_not_repeat_itself_is_refused_with_the_place() -> None:
    with pytest.raises(rekindle.RekindleError, match=r"as number [3-9] it ran none, then 'blocks"):
        rekindle.profile(Unsteady(), torch.randn(4, 8))


class OnPacked(nn.Module):
    """A block that takes and gives a PackedSequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, packed: nn.utils.rnn.PackedSequence) -> nn.utils.rnn.PackedSequence:
        out: nn.utils.rnn.PackedSequence = self.lstm(packed)[0]
        return out


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OnPacked() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, [9, 6, 2], batch_first=True)
        for layer in self.layers:
            packed = layer(packed)
        return packed.data.square().mean()


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = [x[0, :9], x[1, :6], x[2, :2]]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        for layer in self.layers:
            nested = layer(nested)
        return nested.values().square().mean()


@pytest.mark.parametrize("kind", [Packing, Jagged])
def test_blocks_may_take_what_is_made_of_several_tensors(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(3, 9, 8)
    model(x).backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    plan = rekindle.fit(model, x, "85%")
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    model(x).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    rekindle.remove(model)


class WithScripts(nn.Module):
    """Scripted blocks behind a module with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(torch.jit.script(Block(8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_scripted_blocks_are_refused_with_everything_as_it_was() -> None:
    model, x = WithScripts(), torch.randn(4, 8)
    before = [b.clone() for b in model.buffers()]
    with pytest.raises(ValueError, match=r"layers\.0 is scripted"):
        rekindle.fit(model, x, "80%")
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


@pytest.mark.parametrize("what", ["recompute", "offload", rekindle.policies.keep_matmuls])
def test_scripting_a_model_that_has_a_strategy_says_to_remove_it_first(what: Any) -> None:
    model = nn.Sequential(Block(8), Block(8))
    rekindle.apply(model, what)
    with pytest.raises(rekindle.RekindleError, match=r"rekindle\.remove"):
        torch.jit.script(model)
    rekindle.remove(model)
    torch.jit.script(model)
