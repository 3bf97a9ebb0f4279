"""Regions inside regions, of both variants, to any depth."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import rekindle
from tests.toys import Stack, assert_same_step

DEPTHS = [1, 2, 3, 4, 5]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def plain(x: Tensor, depth: int) -> Tensor:
    """The nested function without regions: two ops, the rest, one op."""
    x = x.sin().exp()
    return (plain(x, depth - 1) if depth else x).cos()


def nested(x: Tensor, variants: tuple[bool, ...]) -> Tensor:
    """As `plain`, one region per depth; each says whether it is reentrant."""
    x = x.sin().exp()
    if variants:
        x = rekindle.checkpoint(nested, x, variants[1:], use_reentrant=variants[0])
    return x.cos()


class Holder(NamedTuple):
    x: Tensor


@pytest.mark.parametrize("depth", DEPTHS)
def test_nested_regions_train_as_the_plain_run(depth: int) -> None:
    x = leaf(3)
    assert_same_step(lambda: plain(x, depth), lambda: nested(x, (False,) * depth), [x])


@pytest.mark.parametrize("depth", DEPTHS)
def test_each_depth_replays_once_per_backward(depth: int) -> None:
    x = leaf(3)
    with rekindle.observe() as seen:
        nested(x, (False,) * depth).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (depth, depth)


@pytest.mark.parametrize("depth", DEPTHS)
def test_each_depth_replays_its_own_ops_and_those_of_all_inside_it(depth: int) -> None:
    """A region with n regions in it has 3 (n + 1) ops, and stops before its last, a cos."""
    x = leaf(3)
    with rekindle.observe() as seen:
        nested(x, (False,) * depth).sum().backward()
    assert seen.total.ops_replayed == sum(3 * (n + 1) - 1 for n in range(depth))


@pytest.mark.parametrize(
    "variants",
    [
        v
        for depth in DEPTHS
        for v in itertools.product([False, True], repeat=depth)
        if any(v) and (depth < 4 or v in ((True, False) * 2, (False, True) * 2 + (False,)))
    ],
    ids=lambda v: "".join("nr"[one] for one in v),
)
def test_both_variants_nest_in_each_other_and_train_as_the_plain_run(
    variants: tuple[bool, ...],
) -> None:
    x = leaf(3)
    assert_same_step(lambda: plain(x, len(variants)), lambda: nested(x, variants), [x])


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_dropout_and_batch_norm_in_nested_regions_end_a_step_as_plain(
    outer: bool, inner: bool
) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Linear(4, 4))

    def region(model: nn.Sequential, x: Tensor) -> Tensor:
        return rekindle.checkpoint(model, x.sin(), use_reentrant=inner) * torch.rand(4)

    ours, theirs, x = model(), model(), leaf(6, 4)
    assert_same_step(
        lambda: theirs(x.sin()) * torch.rand(4),
        lambda: rekindle.checkpoint(region, ours, x, use_reentrant=outer),
        [x],
    )
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_retain_graph_and_double_backward_work_at_any_depth(depth: int) -> None:
    x = leaf(3)

    def ways(out: Tensor) -> list[Tensor]:
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(out.sum(), x)
        return [first, second, again]

    for a, b in zip(ways(plain(x, depth)), ways(nested(x, (False,) * depth)), strict=True):
        assert torch.equal(a, b)


def test_several_inner_regions_replay_once_each() -> None:
    model, x = Stack(4), leaf(2, 8)
    with rekindle.observe() as seen:
        assert_same_step(
            lambda: model(x),
            lambda: rekindle.checkpoint(lambda x: model(x, rekindle.checkpoint), x),
            [x, *model.parameters()],
        )
    assert (seen.regions["Block"].forwards, seen.regions["Block"].replays) == (4, 4)
    assert seen.total.replays == 5


def test_an_outer_replay_stops_where_the_last_inner_region_begins() -> None:
    x = leaf(3)

    def inner(x: Tensor) -> Tensor:
        return x.sin().exp().cos()

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(inner, x.sin().cos())

    with rekindle.observe() as seen:
        rekindle.checkpoint(outer, x).sum().backward()
    assert seen.regions[outer.__qualname__].ops_replayed == 2


def test_an_outer_replay_stops_there_also_if_the_inner_region_gets_a_mask() -> None:
    """A mask has no gradient; it is an argument all the same, written before the region begins."""
    x, mask = leaf(3), torch.ones(3)

    def inner(x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask).sin().exp().cos()

    def outer(x: Tensor, mask: Tensor) -> Tensor:
        return rekindle.checkpoint(inner, x.sin().cos(), mask)

    with rekindle.observe() as seen:
        rekindle.checkpoint(outer, x, mask).sum().backward()
    assert seen.regions[outer.__qualname__].ops_replayed == 2


def test_the_engines_own_copies_of_buffers_are_not_counted_as_replayed_ops() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.steps.add_(1)
            return x.exp()

    x, counting = leaf(3), Counting()

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(counting, x.sin()).cos()

    with rekindle.observe() as seen:
        rekindle.checkpoint(outer, x).sum().backward()
    assert counting.steps == 1
    assert seen.regions[outer.__qualname__].ops_replayed == 3  # sin, add_, exp


def holds(make_argument: Callable[[Tensor], Any], read: Callable[[Any], Tensor]) -> bool:
    """Whether an activation that an inner region is called with outlives the outer forward."""
    x, storages = leaf(3), []

    def outer(x: Tensor) -> Tensor:
        hidden = x.sin().exp()
        storages.append(StorageWeakRef(hidden.untyped_storage()))
        return rekindle.checkpoint(lambda a: read(a).cos().sin(), make_argument(hidden))

    out = rekindle.checkpoint(outer, x)
    held = not storages[0].expired()
    out.sum().backward()
    return held


@pytest.mark.parametrize(
    ("make_argument", "read"),
    [
        (lambda h: h, lambda a: a),
        (lambda h: [h], lambda a: a[0]),
        (lambda h: {"h": (h,)}, lambda a: a["h"][0]),
        (Holder, lambda a: a.x),
    ],
    ids=["tensor", "list", "nested dict", "named tuple"],
)
def test_an_inner_region_holds_nothing_of_its_own(
    make_argument: Callable[[Tensor], Any], read: Callable[[Any], Tensor]
) -> None:
    assert not holds(make_argument, read)


def test_the_same_region_called_many_times_replays_as_often() -> None:
    x, w = leaf(3), leaf(3)

    def region(x: Tensor) -> Tensor:
        return (x * w).sin().exp().cos()

    def step(run: Callable[..., Tensor]) -> Tensor:
        out = x
        for _ in range(6):
            out = run(region, out)
        return out

    with rekindle.observe() as seen:
        assert_same_step(lambda: step(lambda f, x: f(x)), lambda: step(rekindle.checkpoint), [x, w])
    assert (seen.total.forwards, seen.total.replays) == (6, 6)


def test_an_exception_in_an_inner_region_leaves_the_outer_able_to_go_on() -> None:
    x = leaf(3)

    def broken(x: Tensor) -> Tensor:
        x.sin()
        raise ValueError("inner")

    def outer(x: Tensor) -> Tensor:
        hidden = x.sin()
        try:
            rekindle.checkpoint(broken, hidden)
        except ValueError:
            hidden = hidden.exp()
        return hidden.cos()

    assert_same_step(lambda: x.sin().exp().cos(), lambda: rekindle.checkpoint(outer, x), [x])
