"""Policies as `context_fn`, and as policy functions of torch."""

import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import SelectiveCheckpointContext as TorchContext

import rekindle
from rekindle import CheckpointPolicy
from rekindle.policies import (
    Policy,
    first,
    keep,
    of,
    offload,
    recompute,
    recompute_cheap,
    spill,
)
from tests.regions.selective.toy_regions import keep_products, product, replayed, waves
from tests.toys import assert_same_step, leaf

aten = torch.ops.aten


def in_contexts(policy: Any, make: Any = rekindle.create_selective_checkpoint_contexts) -> Any:
    return functools.partial(make, policy)


torchs = torch.utils.checkpoint.create_selective_checkpoint_contexts


@pytest.mark.parametrize(
    "context_fn",
    [
        keep(aten.mm),
        of(keep_products),
        of([aten.mm]),
        in_contexts(keep(aten.mm)),
        in_contexts(keep_products),
        in_contexts([aten.mm]),
        in_contexts([aten.mm.default]),
        in_contexts(first(1, keep(aten.mm))),
        in_contexts(keep(aten.mm), torchs),
        in_contexts([aten.mm.default], torchs),
        in_contexts(first(1, keep(aten.mm)), torchs),
        lambda: rekindle.create_selective_checkpoint_contexts(keep(aten.mm)),
    ],
)
def test_a_policy_is_a_context_fn_or_makes_one(context_fn: Any) -> None:
    w = leaf(4, 4)
    assert replayed(product, w, context_fn) == 2
    run = functools.partial(rekindle.checkpoint, product, w, context_fn=context_fn)
    assert_same_step(lambda: product(w), run, [w])


def test_the_same_two_contexts_may_serve_many_calls() -> None:
    contexts = rekindle.create_selective_checkpoint_contexts(first(2, keep()))
    assert [replayed(waves, leaf(3), lambda: contexts) for _ in range(2)] == [3, 3]


@pytest.mark.parametrize(
    "policy",
    [keep(aten.mm), first(1, keep()), recompute_cheap, keep_products | keep(aten.exp)],
    ids=repr,
)
def test_torchs_own_checkpoint_takes_our_policies(policy: Policy) -> None:
    w = leaf(4, 4)
    for context_fn in (policy, in_contexts(policy)):
        run = functools.partial(torch.utils.checkpoint.checkpoint, product, w, use_reentrant=False)
        assert_same_step(lambda: product(w), functools.partial(run, context_fn=context_fn), [w])


@pytest.mark.parametrize(
    ("policy", "answer"),
    [
        (keep(aten.mm), CheckpointPolicy.MUST_SAVE),
        (recompute(aten.mm), CheckpointPolicy.PREFER_RECOMPUTE),
        (keep(aten.sin), CheckpointPolicy.PREFER_RECOMPUTE),
        (offload(aten.mm), CheckpointPolicy.MUST_CPU_OFFLOAD),
        (spill(aten.mm), CheckpointPolicy.MUST_CPU_OFFLOAD),
        (of(lambda *args: CheckpointPolicy.PREFER_SAVE), CheckpointPolicy.MUST_SAVE),
        (of(lambda ctx, op, a, b: b == 2), CheckpointPolicy.MUST_SAVE),
    ],
    ids=repr,
)
def test_a_policy_answers_as_a_torch_policy_function(
    policy: Policy, answer: CheckpointPolicy
) -> None:
    ctx = TorchContext(is_recompute=False)
    assert policy(ctx, aten.mm.default, 1, 2) is answer


def test_a_policy_that_is_given_as_it_is_makes_no_dispatch_modes() -> None:
    class Silent(type(keep())):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("the engine takes the policy itself")

    silent = Silent(keep().then, None)  # type: ignore[attr-defined]
    assert replayed(waves, leaf(3), silent) == 0
