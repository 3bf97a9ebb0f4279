"""Jagged tensors as arguments of regions.

Autograd asks a leaf jagged tensor for its sizes while it holds the tensor's lock, and dispatch
modes see that as an op: Note [Questions that are no ops]. A region that then looked at the tensor's
`grad_fn` waited for ever, with Python's lock held. So each test ends the process after a while.
"""

import faulthandler
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import rekindle
from rekindle import policies
from tests.graphs import TORCHS_WARNINGS, fresh_compiler
from tests.toys import same_bits

pytestmark = [
    *TORCHS_WARNINGS,
    pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"),
]
LONG = 120.0
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def ends_if_it_hangs() -> Iterator[None]:
    faulthandler.dump_traceback_later(LONG, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


LINEAR = nn.Linear(4, 4)


def leaf() -> Tensor:
    torch.manual_seed(0)
    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def pointwise(x: Tensor) -> Tensor:
    return x.sin().exp()


def products(x: Tensor) -> Tensor:
    return torch.softmax(LINEAR(x).sin(), -1) * x


def changed_in_place(x: Tensor) -> Tensor:
    return LINEAR(x).sin_().exp()  # type: ignore[no-any-return]


def attention(x: Tensor) -> Tensor:
    """On the CPU its kernels are given nested tensors that are not jagged, and have no shape."""
    heads = LINEAR(x).unflatten(-1, [2, 2]).transpose(1, 2)
    return scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


REGIONS = [pointwise, products, changed_in_place, attention]
OPTIONS: dict[str, dict[str, Any]] = {
    "no policy": {},
    "recompute": {"context_fn": policies.recompute()},
    "keep": {"context_fn": policies.keep(aten.sin)},
    "spill": {"context_fn": policies.spill(aten.sin)},
    "a list of ops": {
        "context_fn": lambda: create_selective_checkpoint_contexts([aten.sin.default])
    },
    "values compared": {"determinism_check": "values"},
    "values compared under a policy": {
        "context_fn": policies.recompute(),
        "determinism_check": "values",
    },
}


def look(tensor: Tensor) -> Tensor:
    """A hook that asks for what autograd's lock is about."""
    assert tensor.is_leaf == (tensor.grad_fn is None)
    return tensor.detach()


AROUND: dict[str, Callable[[], Any]] = {
    "nothing": nullcontext,
    "offload": lambda: rekindle.offload(tier="disk", quota=1.0, min_bytes=8),
    "hooks": lambda: saved_tensors_hooks(look, lambda tensor: tensor),
    "a mode": rekindle.observe,
}


def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    x = leaf()
    LINEAR.zero_grad()
    run(x).values().sum().backward()
    assert x.grad is not None
    return [x.grad.values(), LINEAR.weight.grad, LINEAR.bias.grad]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("region", REGIONS)
def test_a_region_of_a_leaf_jagged_tensor_has_the_gradients_of_the_plain_call(
    region: Callable[[Tensor], Tensor], options: str, around: str
) -> None:
    def run(x: Tensor) -> Tensor:
        with AROUND[around]():
            return rekindle.checkpoint(region, x, **OPTIONS[options])  # type: ignore[no-any-return]

    assert all(map(same_bits, gradients(region), gradients(run)))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("region", REGIONS)
def test_a_leaf_jagged_tensor_in_nested_regions(
    region: Callable[[Tensor], Tensor], options: str
) -> None:
    def inner(x: Tensor) -> Tensor:
        return rekindle.checkpoint(region, x, **OPTIONS[options])  # type: ignore[no-any-return]

    def run(x: Tensor) -> Tensor:
        return rekindle.checkpoint(inner, x)  # type: ignore[no-any-return]

    assert all(map(same_bits, gradients(region), gradients(run)))


@pytest.mark.parametrize("region", [pointwise, products, changed_in_place])
def test_torchs_policy_region_of_a_leaf_jagged_tensor_does_the_same(
    region: Callable[[Tensor], Tensor],
) -> None:
    options = {"context_fn": lambda: create_selective_checkpoint_contexts([aten.sin.default])}
    ours = gradients(lambda x: rekindle.checkpoint(region, x, **options))
    torchs = gradients(lambda x: torchs_checkpoint(region, x, use_reentrant=False, **options))
    assert all(map(same_bits, torchs, ours))


def test_a_policy_is_asked_of_ops_and_not_of_questions_for_sizes() -> None:
    asked: list[str] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(op.name())
        return rekindle.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    rekindle.checkpoint(pointwise, leaf(), context_fn=contexts)
    assert asked == ["aten::sin", "aten::exp"]


def test_observing_counts_no_questions_for_sizes() -> None:
    with rekindle.observe() as seen:
        rekindle.checkpoint(lambda x: pointwise(x).cos(), leaf()).values().sum().backward()
    assert (seen.total.replays, seen.total.ops_replayed) == (1, 2)


# Compiled, in torch's place


def made_inside(values: Tensor, offsets: Tensor) -> Tensor:
    return LINEAR(torch.nested.nested_tensor_from_jagged(values, offsets)).sin().values()  # type: ignore[no-any-return]


def closed_over(values: Tensor, offsets: Tensor) -> Tensor:
    outer = torch.nested.nested_tensor_from_jagged(values, offsets)

    def region(sines: Tensor) -> Tensor:
        return (torch.nested.nested_tensor_from_jagged(sines, offsets) * outer).values()  # type: ignore[no-any-return]

    return called(region, values.sin())


def called(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "step", [lambda *args: called(made_inside, *args), closed_over], ids=["made", "closed over"]
)
def test_a_compiled_region_with_jagged_tensors_in_torchs_place_is_as_torchs(
    step: Callable[[Tensor, Tensor], Tensor],
) -> None:
    values, offsets = torch.randn(5, 4, requires_grad=True), torch.tensor([0, 2, 5])

    def gradient_of(run: Callable[..., Tensor]) -> Tensor | None:
        values.grad = None
        run(values, offsets).sum().backward()
        return values.grad

    def compiled() -> Tensor | None:
        with fresh_compiler():
            return gradient_of(torch.compile(step, backend="aot_eager", fullgraph=True))

    torchs = compiled()
    with rekindle.patch_torch():
        ours = compiled()
        eager = gradient_of(step)
    assert same_bits(torchs, ours)
    assert same_bits(torchs, eager)
