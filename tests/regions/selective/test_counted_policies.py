"""Policies that count ops, and policies that keep the arguments of ops."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import rekindle
from rekindle.policies import Policy, at, every, first, keep, keep_inputs, of, recompute
from tests.regions.selective.toy_regions import Layer, replayed, waves
from tests.toys import leaf

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("policy", "ops"),
    [
        (first(1, keep()), 4),
        (first(2, keep(aten.sin)), 3),
        (first(100, keep()), 0),
        (every(1, keep()), 0),
        (every(2, keep(aten.sin)), 2),
        (every(3, keep()), 3),
        (every(100, keep()), 4),
        (every(2, every(2, keep())), 3),
        (first(1, every(2, keep())), 4),
        (first(2, keep()) | every(2, keep()), 1),
        (first(2, keep(aten.cos)), 5),
        (first(2, recompute()) | keep(), 2),
    ],
    ids=repr,
)
def test_counted_policies_speak_for_some_ops_only(policy: Policy, ops: int) -> None:
    assert replayed(waves, leaf(3), policy) == ops


def test_only_ops_that_a_policy_speaks_of_are_counted() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x.cos().cos().sin()
        return x

    assert replayed(region, x, recompute()) == 8
    assert replayed(region, x, every(2, keep(aten.sin))) == 7  # the third is not needed


@pytest.mark.parametrize("policy", [first(2, keep()), every(2, keep()), every(4, keep())], ids=repr)
def test_each_call_of_a_region_counts_anew(policy: Policy) -> None:
    x = leaf(3)
    counts = [replayed(waves, x, policy) for _ in range(3)]
    assert counts == [counts[0]] * 3


def test_a_call_that_failed_leaves_no_count_behind() -> None:
    policy, x = first(2, keep()), leaf(3)

    def fails(x: Tensor) -> Tensor:
        x.sin()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rekindle.checkpoint(fails, x, context_fn=policy)
    assert replayed(waves, x, policy) == 3


def test_a_region_inside_another_counts_by_itself() -> None:
    policy, x = first(1, keep(aten.sin)), leaf(3)

    def inner(x: Tensor) -> Tensor:
        return x.sin().exp().sin().exp()

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(inner, x.sin(), context_fn=policy)

    with rekindle.observe() as seen:
        rekindle.checkpoint(outer, x, context_fn=policy).sum().backward()
    assert seen.regions[inner.__qualname__].ops_replayed == 3
    assert seen.regions[outer.__qualname__].ops_replayed == 1  # the inner region's first `sin`


def test_threads_count_by_themselves() -> None:
    policy, together = first(2, keep()), threading.Barrier(2)

    def in_step(x: Tensor) -> Tensor:
        for _ in range(6):
            together.wait(120)
            x = x.sin()
        return x

    def held(_: int) -> int:
        kept = []

        def noting(ctx: Any, op: Any, *args: Any) -> Any:
            kept.append(policy.decide(ctx) is not None)
            return None

        rekindle.checkpoint(in_step, leaf(3), context_fn=of(noting)).sum().backward()
        return sum(kept)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(held, range(2))) == [2, 2]


def test_equal_policies_in_two_places_count_by_themselves() -> None:
    policy = at("attn", first(1, keep(aten.exp))) | at("mlp", first(1, keep(aten.exp)))
    assert replayed(Layer(), leaf(3), policy) == 0


def sums(w: Tensor) -> Tensor:
    """Backward needs the second result; it is as large as the first, of which it is made."""
    return ((w @ w) + 1) @ w


def test_what_an_op_is_given_is_kept_in_place_of_what_that_was_made_from() -> None:
    found = []
    for policy in (keep(aten.mm), keep(aten.mm) | keep_inputs(aten.mm)):
        with rekindle.observe() as seen:
            rekindle.checkpoint(sums, leaf(4, 4), context_fn=policy).sum().backward()
        found.append((seen.total.ops_replayed, seen.total.activations_held, seen.total.bytes_held))
    assert found == [(1, 2, 128), (0, 2, 128)]


def test_what_an_op_is_given_is_not_kept_if_what_that_was_made_from_is_there_anyway() -> None:
    assert replayed(lambda w: (w + 1) @ w, leaf(4, 4), keep_inputs(aten.mm)) == 1


def test_what_an_op_is_given_is_not_kept_if_it_is_larger_than_what_that_was_made_from() -> None:
    def region(w: Tensor) -> Tensor:
        return torch.cat([w @ w, w]) @ w

    assert replayed(region, leaf(4, 4), keep(aten.mm) | keep_inputs(aten.mm)) == 1


def test_what_an_op_is_given_is_kept_also_by_a_policy_inside_another() -> None:
    class Sums(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return sums(w)

    layer = Layer()
    layer.mlp = Sums()
    policy = keep(aten.exp, aten.mm) | at("mlp", keep_inputs(aten.mm))
    assert replayed(layer, leaf(4, 4), keep(aten.exp, aten.mm) | keep_inputs(aten.mm)) == 0
    assert replayed(layer, leaf(4, 4), policy) == 0
