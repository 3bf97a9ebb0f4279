"""Regions under policies inside others, and graphs that are gone through again."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import rekindle
from rekindle import policies
from rekindle.policies import at, first, keep, named, recompute, spill
from tests.regions.selective.toy_regions import SOME_POLICIES, replayed, two_products
from tests.toys import Stack, assert_same_step, leaf, same_bits

aten = torch.ops.aten


@pytest.mark.parametrize("policy", SOME_POLICIES, ids=repr)
def test_a_graph_is_gone_through_as_often_as_wanted(policy: policies.Policy) -> None:
    """Field note 10."""
    w = leaf(4, 4)
    (expected,) = torch.autograd.grad(two_products(w).sum(), w)
    loss = rekindle.checkpoint(two_products, w, context_fn=policy).sum()
    for _ in range(3):
        (found,) = torch.autograd.grad(loss, w, retain_graph=True)
        assert same_bits(found, expected)
    loss.backward()
    assert same_bits(w.grad, expected)


def test_every_backward_through_a_retained_graph_runs_the_same_ops_again() -> None:
    """Field note 10."""
    counts = []
    with rekindle.observe() as seen:
        loss = rekindle.checkpoint(two_products, leaf(4, 4), context_fn=keep(aten.mm)).sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
            counts.append((seen.total.replays, seen.total.ops_replayed))
    assert counts == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("policy", SOME_POLICIES, ids=repr)
def test_gradients_of_gradients_are_plain(policy: policies.Policy) -> None:
    """Field note 10."""

    def ways(run: Callable[[], Tensor]) -> list[Tensor]:
        out = run().sum()
        (one,) = torch.autograd.grad(out, w, create_graph=True)
        (two,) = torch.autograd.grad(one.sin().sum(), w, retain_graph=True)
        (again,) = torch.autograd.grad(out, w)
        return [one, two, again]

    w = leaf(4, 4)
    expected = ways(lambda: two_products(w))
    found = ways(lambda: rekindle.checkpoint(two_products, w, context_fn=policy))
    for a, b in zip(expected, found, strict=True):
        assert same_bits(a, b)


def test_two_backwards_without_shared_ops_need_no_retained_graph() -> None:
    """Field note 10."""
    x = leaf(4)

    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        shared = x + 1
        return shared.exp(), shared.sin()

    (expected,) = torch.autograd.grad(sum(part.sum() for part in region(x)), x)
    one, two = rekindle.checkpoint(region, x, context_fn=recompute())
    one.sum().backward()
    two.sum().backward()
    torch.testing.assert_close(x.grad, expected)


Way = policies.Policy | str | None
WAYS: dict[str, Way] = {
    "keep": keep(),
    "recompute": recompute(),
    "sin": keep(aten.sin),
    "spill": spill(),
    "first": first(1, keep()),
    "region": "plain",
    "reentrant": "reentrant",
}


def nested(x: Tensor, ways: tuple[Way, ...]) -> Tensor:
    """Two ops, a region with the rest, two ops; as often as there are ways to run a region."""
    x = x.sin().exp()
    if ways:
        inner = functools.partial(nested, ways=ways[1:])
        if isinstance(ways[0], policies.Policy):
            x = rekindle.checkpoint(inner, x, context_fn=ways[0])
        elif ways[0] is None:
            x = inner(x)
        else:
            x = rekindle.checkpoint(inner, x, use_reentrant=ways[0] == "reentrant")
    return x.cos() * x


@pytest.mark.parametrize("inner", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("outer", WAYS.values(), ids=WAYS.keys())
def test_regions_of_every_sort_nest(outer: Way, inner: Way) -> None:
    """Field note 10."""
    x = leaf(4)
    assert_same_step(lambda: nested(x, (None,) * 2), lambda: nested(x, (outer, inner)), [x])


@pytest.mark.parametrize("ways", [*itertools.product(list(WAYS)[:6], repeat=3)], ids="-".join)
def test_regions_of_every_sort_nest_three_deep(ways: tuple[str, ...]) -> None:
    """Field note 10."""
    x = leaf(4)
    chosen = tuple(WAYS[way] for way in ways)
    assert_same_step(lambda: nested(x, (None,) * 3), lambda: nested(x, chosen), [x])


def test_a_region_inside_a_selective_one_is_asked_by_its_own_policy() -> None:
    """Field note 10."""

    def inner(x: Tensor) -> Tensor:
        return x.sin().exp().sin().exp()

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(inner, x.cos().tanh(), context_fn=keep(aten.sin)).cos().tanh()

    with rekindle.observe() as seen:
        rekindle.checkpoint(outer, leaf(4), context_fn=keep(aten.cos)).sum().backward()
    assert seen.regions[inner.__qualname__].ops_replayed == 2  # both `exp`


def test_paths_are_the_same_where_a_plain_region_around_is_replayed() -> None:
    """Field note 10. The replay calls the region alone, without the model around it."""
    stack, x = Stack(2), leaf(2, 8)
    policy = at("blocks.*.mlp", keep())

    def run(block: nn.Module, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return rekindle.checkpoint(block, x, context_fn=policy)

        return rekindle.checkpoint(inner, x)

    assert_same_step(lambda: stack(x), lambda: stack(x, run), [x, *stack.parameters()])


def test_names_are_the_same_where_a_plain_region_around_is_replayed() -> None:
    """Field note 10."""
    x = leaf(4)

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(product_of_vectors, x.sin(), context_fn=named("all"))

    def product_of_vectors(x: Tensor) -> Tensor:
        return x.exp().sin() * x.cos().exp()

    around = rekindle.name(lambda x: rekindle.checkpoint(outer, x), "all")
    assert_same_step(lambda: product_of_vectors(x.sin()), lambda: around(x), [x])


@pytest.mark.parametrize("policy", [first(3, keep()), keep(aten.mm), first(1, keep())], ids=repr)
def test_what_is_kept_passes_through_the_users_hooks(policy: policies.Policy) -> None:
    """Field note 11. What hooks around the region give back is what backward computes with."""
    w = leaf(4, 4)
    given: list[Tensor] = []

    def unpack(index: int) -> Tensor:
        return held[index].float()

    def pack(tensor: Tensor) -> int:
        given.append(tensor)
        held.append(tensor.detach().double())
        return len(held) - 1

    held: list[Tensor] = []
    with saved_tensors_hooks(pack, unpack):
        out = rekindle.checkpoint(two_products, w, context_fn=policy)
    made = [tensor for tensor in given if tensor is not w]
    assert len(made) == {first(3, keep()): 3, keep(aten.mm): 2, first(1, keep()): 1}[policy]
    (found,) = torch.autograd.grad(out.sum(), w)
    assert same_bits(found, torch.autograd.grad(two_products(w).sum(), w)[0])


@pytest.mark.parametrize("policy", SOME_POLICIES, ids=repr)
def test_debug_works(policy: policies.Policy) -> None:
    """Field note 12."""
    w = leaf(4, 4)
    run = functools.partial(rekindle.checkpoint, two_products, w, context_fn=policy, debug=True)
    assert_same_step(lambda: two_products(w), run, [w])


def test_debug_works_when_it_is_turned_on_for_all() -> None:
    """Field note 12."""
    with rekindle.set_checkpoint_debug_enabled(True):
        assert replayed(two_products, leaf(4, 4), keep(aten.mm)) == 1
