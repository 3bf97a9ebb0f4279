"""Policies that count, share a counter, or answer at random."""

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import rekindle
from rekindle import CheckpointPolicy
from rekindle.policies import every, first, keep, of
from tests.regions.selective.toy_regions import replayed, two_products
from tests.toys import Stack, assert_same_step, leaf

aten = torch.ops.aten


def test_a_policy_that_counts_by_its_state_counts_the_same_in_every_call() -> None:
    """Field note 15."""

    def every_second_product(ctx: Any, op: Any, *args: Any) -> bool:
        if op is not aten.mm.default:
            return False
        ctx.state["products"] = ctx.state.get("products", 0) + 1
        return ctx.state["products"] % 2 == 1

    w = leaf(4, 4)
    by_hand = of(every_second_product)
    assert [replayed(two_products, w, by_hand) for _ in range(3)] == [2, 2, 2]
    assert [replayed(two_products, w, every(2, keep(aten.mm))) for _ in range(3)] == [2, 2, 2]


def shared_counter() -> Callable[..., CheckpointPolicy]:
    """As trainers write it: one counter for forwards and one for replays, in all layers."""
    seen: defaultdict[str, int] = defaultdict(int)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        mode = "recompute" if ctx.is_recompute else "forward"
        if op is aten.addmm.default:
            seen[mode] += 1
        if op is aten.addmm.default and seen[mode] % 2:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def test_a_policy_that_shares_a_counter_between_layers_has_the_plain_gradients() -> None:
    """Field note 15. Layers run forwards 1, 2, 3 and are made again 3, 2, 1."""
    stack, x = Stack(3, drop=0.2), leaf(2, 8)
    context_fn = functools.partial(rekindle.create_selective_checkpoint_contexts, shared_counter())

    def run(block: nn.Module, x: Tensor) -> Tensor:
        return rekindle.checkpoint(block, x, context_fn=context_fn)

    for _ in range(2):
        assert_same_step(lambda: stack(x), lambda: stack(x, run), [x, *stack.parameters()])


def test_a_policy_that_answers_at_random_has_the_plain_gradients() -> None:
    """Field note 15."""
    stack, x = Stack(3, drop=0.2), leaf(2, 8)
    draw = torch.Generator().manual_seed(0)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(torch.rand((), generator=draw) < 0.5)

    for _ in range(5):
        assert_same_step(
            lambda: stack(x),
            lambda: rekindle.checkpoint(stack, x, context_fn=of(policy)),
            [x, *stack.parameters()],
        )


def test_two_regions_with_one_counted_policy_do_not_count_each_other() -> None:
    """Field note 15."""
    w, policy = leaf(4, 4), first(1, keep(aten.mm))

    def region(w: Tensor) -> Tensor:
        return two_products(w)

    with rekindle.observe() as seen:
        one = rekindle.checkpoint(two_products, w, context_fn=policy)
        two = rekindle.checkpoint(region, w, context_fn=policy)
        (one.sum() + two.sum()).backward()
    assert seen.regions[two_products.__qualname__].ops_replayed == 2
    assert seen.regions[region.__qualname__].ops_replayed == 2
