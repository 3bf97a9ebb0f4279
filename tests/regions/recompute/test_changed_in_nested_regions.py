"""What a region under a policy holds and another one, around it, changes in place.

See Note [What an op saves before it runs]. A region copies what it holds before it is changed; what
a region hands on to the hooks around it, those have to keep as it was.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import rekindle
from rekindle import policies
from rekindle.errors import CheckpointError
from tests.offloading import spilling
from tests.toys import assert_same_step, leaf

POLICIES = {
    "keep": policies.keep(),
    "recompute": policies.recompute(),
    "keep matmuls": policies.keep_matmuls_and_attention,
    "every second": policies.every(2, policies.keep()),
    "spill": policies.spill(),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


@contextmanager
def handing_back() -> Iterator[None]:
    """Hooks of the user's that give back the very tensor they were given."""
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


def nested(function: Callable[..., Any], policy: Any, depth: int) -> Callable[..., Any]:
    """A function in so many regions, one in the other."""
    for _ in range(depth):
        function = region_of(function, policy)
    return function


def region_of(function: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    return lambda *args: rekindle.checkpoint(function, *args, context_fn=policy)


class Changes(nn.Module):
    """An inner part that uses what it returns, and an outer part that changes that in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        a, b = self.linear(x).unsafe_chunk(2, 1)
        a.sigmoid_()
        used = a + b
        return a, b, used * used

    def change_chunks(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        return b.mul_(2.0) + a + out

    def product(self, x: Tensor) -> tuple[Tensor, ...]:
        product = self.linear(x)
        used = product + 1.0
        return product, used * used

    def change_product(self, product: Tensor, out: Tensor) -> Tensor:
        return product.mul_(2.0).sin() + out


CHANGES = {
    "chunks": (Changes.chunks, Changes.change_chunks),
    "a product": (Changes.product, Changes.change_product),
}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())


def assert_plain(
    run: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    module: nn.Module,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Outputs and gradients are those of the plain run, several times in a row."""
    x = leaf(4, 8)

    def inside() -> Tensor:
        with around():
            return run(x)

    for seed in range(3):
        assert_same_step(lambda: plain(x), inside, [x, *module.parameters()], seed=seed)


@every_change
@every_policy
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_an_inner_region_returns_may_be_changed_in_place_by_the_region_around_it(
    change: Any, policy: Any, depth: int
) -> None:
    """The inner part is `depth` regions deep in the one that changes what it returns."""
    module = Changes()
    make, write = change
    inner = nested(lambda x: make(module, x), policy, depth)
    outer = region_of(lambda x: write(module, *inner(x)), policy)
    assert_plain(outer, lambda x: write(module, *make(module, x)), module)


@every_policy
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", [nn.GRU, nn.GRUCell, nn.LSTMCell])
def test_recurrent_modules_in_regions_in_regions_have_plain_gradients(
    kind: Any, policy: Any, depth: int
) -> None:
    module = kind(8, 8)

    def plain(x: Tensor) -> Tensor:
        out = module(x)
        return out[0] if isinstance(out, tuple) else out

    assert_plain(nested(plain, policy, depth), plain, module)


@every_change
@every_policy
@pytest.mark.parametrize("around", [spilling, handing_back], ids=["offload", "the user's hooks"])
def test_what_hooks_around_a_region_hold_for_it_may_be_changed_in_place_in_the_region(
    change: Any, policy: Any, around: Callable[[], AbstractContextManager[Any]]
) -> None:
    module = Changes()
    make, write = change

    def plain(x: Tensor) -> Tensor:
        out: Tensor = write(module, *make(module, x))
        return out

    assert_plain(region_of(plain, policy), plain, module, around)


@every_change
@every_policy
@pytest.mark.parametrize("outer", [rekindle.checkpoint, torch_checkpoint], ids=["ours", "torch's"])
def test_a_region_that_changes_what_it_made_replays_in_one_that_is_recomputed(
    change: Any, policy: Any, outer: Any
) -> None:
    """Hooks of a region that is replayed count what they are given."""
    module = Changes()
    make, write = change

    def plain(x: Tensor) -> Tensor:
        out: Tensor = write(module, *make(module, x))
        return out

    inner = region_of(plain, policy)
    assert_plain(lambda x: outer(inner, x, use_reentrant=False), plain, module)


@every_policy
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("inplace", [False, True])
def test_noise_that_an_op_fills_after_it_is_saved_is_right_in_regions_in_regions(
    policy: Any, depth: int, inplace: bool
) -> None:
    module = nn.Linear(8, 8)

    def plain(x: Tensor) -> Tensor:
        return functional.rrelu(module(x), training=True, inplace=inplace).sin()

    assert_plain(nested(plain, policy, depth), plain, module)


@pytest.mark.parametrize("around", [nullcontext, handing_back], ids=["no hooks", "user's hooks"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (CHANGES["a product"], r"What aten\.addmm\.default made, torch\.float32 \[4, 8\]"),
        (
            CHANGES["chunks"],
            r"A tensor from outside the region, or one that the region changed in place",
        ),
    ],
    ids=CHANGES.keys(),
)
def test_what_a_region_returned_and_was_changed_after_all_regions_is_an_error_that_says_so(
    change: Any, expected: str, around: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Plain autograd has no use for it; the record has, and nobody was there to copy it."""
    module, x = Changes(), leaf(4, 8)
    make, write = change
    policy = policies.keep_matmuls_and_attention
    with around():
        outs = region_of(lambda x: make(module, x), policy)(x)
    out = write(module, *outs)
    with pytest.raises(CheckpointError, match=f"{expected}.*was changed in place after the region"):
        out.sum().backward()


@pytest.mark.parametrize("around", [spilling, handing_back], ids=["offload", "the user's hooks"])
def test_an_argument_that_is_no_leaf_replays_in_a_policy_region_in_a_region_under_hooks(
    around: Callable[[], AbstractContextManager[Any]],
) -> None:
    """What hooks give back for it is a leaf in the replay, and was none in the forward."""
    module = Changes()

    def plain(x: Tensor) -> Tensor:
        return inner(x.sin())

    def inner(y: Tensor) -> Tensor:
        return module.linear(y) * y.cos() * y

    outer = nested(inner, policies.recompute(), 2)
    assert_plain(lambda x: rekindle.checkpoint(outer, x.sin()), plain, module, around)
