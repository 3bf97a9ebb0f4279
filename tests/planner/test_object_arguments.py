"""Blocks that take and return objects which hold tensors, of classes that torch does not know."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.toys import Mlp, gradients, same_bits

pytest.importorskip("scipy")


@dataclass
class Context:
    encoded: Any
    losses: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class State:
    hidden: Tensor


class WithContext(Mlp):
    def forward(self, x: Tensor, context: Any) -> Tensor:  # type: ignore[override]
        out = x + super().forward(x + context.encoded)
        context.losses.append(out.square().mean())
        return out


class OnState(Mlp):
    def forward(self, state: State) -> State:  # type: ignore[override]
        return State(state.hidden + super().forward(state.hidden))


class Contexts(nn.Module):
    """Passes one object to every block, which reads from it and writes to it."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self.encoder = Mlp(32, 128)
        self.layers = nn.ModuleList(WithContext(32, 128) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        context = self.kind(encoded=self.encoder(x), losses=[])
        for layer in self.layers:
            x = layer(x, context)
        return x.square().mean() + torch.stack(context.losses).sum()


class States(nn.Module):
    """Passes an object from block to block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OnState(32, 128) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state = State(2 * x)
        for layer in self.layers:
            state = layer(state)
        return state.hidden.square().mean()


class Plain(States):
    """The same, with tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(32, 128) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Residual(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize("budget", ["85%", "least"])
@pytest.mark.parametrize(
    "make",
    [lambda: Contexts(Context), lambda: Contexts(SimpleNamespace), States],
    ids=["dataclass", "namespace", "states"],
)
def test_a_model_whose_blocks_take_objects_fits(make: Any, budget: str) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(128, 32)
    plain = gradients(lambda: model(x), model.parameters())[1]
    profile = rekindle.profile(model, x)
    plan = rekindle.fit(model, x, profile.recompute_peak if budget == "least" else budget)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    planned = gradients(lambda: model(x), model.parameters())[1]
    assert all(map(same_bits, planned, plain))


def test_blocks_on_objects_have_the_bytes_of_blocks_on_tensors() -> None:
    x = torch.randn(128, 32).requires_grad_()
    on_objects, on_tensors = (rekindle.profile(make(), x) for make in (States, Plain))
    assert on_objects.order == on_tensors.order
    assert on_objects.passed == on_tensors.passed
    assert on_objects.rest_peak == on_tensors.rest_peak
    for a, b in zip(on_objects.blocks, on_tensors.blocks, strict=True):
        assert [c.strategy for c in a.candidates] == [c.strategy for c in b.candidates]
        for name in ("bytes_held", "forward_peak", "backward_peak", "input_freed"):
            found, expected = ([getattr(c, name) for c in block.candidates] for block in (a, b))
            assert found == expected, name


def test_whether_a_tensor_in_an_object_learns_makes_blocks_distinct() -> None:
    profile = rekindle.profile(States(), torch.randn(128, 32))
    assert [index for _, index in profile.order] == [0, 1, 1, 1]
    assert "State with" not in profile.blocks[0].signature
    assert profile.blocks[0].signature.endswith(" with float32[128, 32]")
    assert profile.blocks[1].signature.endswith(" with float32[128, 32] that learns")
