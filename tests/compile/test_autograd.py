"""Backward compiled by `torch._dynamo.config.compiled_autograd`: regions run as in plain backward.

Compiled autograd calls the hooks of saved tensors from compiled code, and what they call would be
compiled too. Steps are repeated: a compiler that traced into the engine left its state wrong for
the next one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.functional import dropout

import rekindle
from rekindle import policies
from tests.graphs import TORCHS_WARNINGS
from tests.toys import assert_same_step, leaf, same_bits

pytestmark = TORCHS_WARNINGS


class Model(nn.Module):
    """A matrix product, dropout and a buffer that changes; knows how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = dropout(self.up(x), 0.5).sin().exp()
        with torch.no_grad():
            self.mean.add_(y.mean(0))
        return (y - self.mean).sin()  # type: ignore[no-any-return]


def backward_of(**options: Any) -> Callable[[Tensor], None]:
    """A backward that is compiled."""
    with torch._dynamo.config.patch(compiled_autograd=True):
        return torch.compile(lambda loss: loss.backward(**options), backend="eager")


Region = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def region_with(**options: Any) -> Region:
    return lambda function, x: rekindle.checkpoint(function, x, **options)


def nested(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return rekindle.checkpoint(lambda x: rekindle.checkpoint(function, x), x)  # type: ignore[no-any-return]


def offloaded(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with rekindle.offload(tier="disk", quota=1.0, min_bytes=16):
        return function(x)


def torchs(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)  # type: ignore[no-any-return]


REGIONS: dict[str, Region] = {
    "no options": region_with(),
    "no early stop": region_with(early_stop=False),
    "values compared": region_with(determinism_check="values"),
    "reentrant": region_with(use_reentrant=True),
    "keep_matmuls": region_with(context_fn=policies.keep_matmuls),
    "recompute": region_with(context_fn=policies.recompute()),
    "spill": region_with(context_fn=policies.spill(torch.ops.aten.addmm, torch.ops.aten.sin)),
    "nested": nested,
    "offload": offloaded,
}


def train(
    region: Region, backward: Callable[[Tensor], None], steps: int = 2
) -> Iterator[Tensor | None]:
    """Gradients, the buffer and the random state after each step of a new model."""
    torch.manual_seed(0)
    model, x = Model(), leaf(3, 4)
    for _ in range(steps):
        backward(region(model, x).sum())
        yield from (x.grad, model.up.weight.grad, model.up.bias.grad)
        yield from (model.mean.clone(), torch.get_rng_state())
        model.zero_grad()
        x.grad = None


@pytest.mark.parametrize("region", REGIONS)
def test_a_compiled_backward_gives_the_gradients_of_a_plain_one(region: str) -> None:
    plain = list(train(lambda function, x: function(x), Tensor.backward))
    compiled = list(train(REGIONS[region], backward_of()))
    assert [same_bits(a, b) for a, b in zip(plain, compiled, strict=True)] == [True] * len(plain)
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] > 0
    x = leaf(3)
    (x * 2).sum().backward()  # an error before, after any compiled backward through a region
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_compiled_backward_replays_a_region_once_as_with_torch(retain_graph: bool) -> None:
    def replays(region: Region) -> int:
        model = Model()
        backward_of(retain_graph=retain_graph)(region(model, leaf(3, 4)).sum())
        return model.calls - 1

    assert (replays(torchs), replays(region_with())) == (1, 1)


@pytest.mark.parametrize("options", [{}, {"context_fn": policies.recompute()}])
def test_a_compiled_backward_does_not_trace_into_the_engine(options: Any) -> None:
    """Of the engine's objects there are new ones at each step, and each would be a recompile."""
    backward, model = backward_of(), Model()
    backward(rekindle.checkpoint(model, leaf(3, 4), **options).sum())
    model.zero_grad(set_to_none=False)  # whether there are gradients, torch does recompile for
    backward(rekindle.checkpoint(model, leaf(3, 4), **options).sum())
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            backward(rekindle.checkpoint(model, leaf(3, 4), **options).sum())


def test_a_compiled_function_in_a_region_is_compiled_in_the_replay_of_a_compiled_backward() -> None:
    ran: list[bool] = []

    def inner(x: Tensor) -> Tensor:
        ran.append(torch.compiler.is_compiling())
        return x.sin().exp()

    compiled = torch.compile(inner, backend="aot_eager")
    x = leaf(3)
    assert_same_step(
        lambda: compiled(x).cos(),
        lambda: rekindle.checkpoint(lambda x: compiled(x).cos(), x),
        [x],
        backward=backward_of(),
    )
    assert ran == [True] * len(ran)


@pytest.mark.parametrize("options", [{}, {"context_fn": policies.recompute()}])
def test_a_compiled_backward_leaves_no_replayed_activation_behind(options: Any) -> None:
    """The second output's activations are replayed with those of the first, and nobody asks."""
    alive: list[Any] = []

    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = x.sin().exp(), x.cos().exp()
        alive.extend((y.untyped_storage()._weak_ref(), z.untyped_storage()._weak_ref()))
        return y.tanh() * 2, z.tanh() * 2

    used, other = rekindle.checkpoint(region, leaf(3), **options)
    backward_of()(used.sum())
    assert [torch.UntypedStorage._expired(storage) for storage in alive] == [True] * len(alive)
    assert other.grad_fn is not None
