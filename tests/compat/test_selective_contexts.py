"""Torch's selective contexts on our engine."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Self

import pytest
import torch
import torch.utils.checkpoint as torch_module
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.compat import checkpoint as compat
from rekindle.compat.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from tests.toys import Stack, assert_same_step, leaf, same_bits

aten = torch.ops.aten
torchs_contexts = torch_module.create_selective_checkpoint_contexts
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class OpLog(TorchDispatchMode):
    """Notes the ops that come this far; reusable."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


class Both(ExitStack):
    """Two contexts as one, the second inside the first."""

    def __init__(self, outer: Any, inner: Any) -> None:
        super().__init__()
        self.contexts = outer, inner

    def __enter__(self) -> Self:
        for context in self.contexts:
            self.enter_context(context)
        return self


def matmuls(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(torch.matmul(torch.matmul(x, w).sin(), w)).exp() * w


def save_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op is aten.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def save_exp(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is aten.exp.default


def save_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE


def save_none(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


POLICIES = {
    "list": ([aten.mm.default], {aten.mm.default}),
    "function": (save_matmuls, {aten.mm.default}),
    "bool": (save_exp, {aten.exp.default}),
    "all": (save_all, {aten.mm.default, aten.sin.default, aten.sigmoid.default, aten.exp.default}),
    "none": (save_none, set()),
}
every_policy = pytest.mark.parametrize(("policy", "saved"), POLICIES.values(), ids=POLICIES)


def selective(policy: Any, log: OpLog | None = None, **options: Any) -> Callable[[], Contexts]:
    """The contexts for a policy; `log` sees what is run in the replay, and not what is kept."""

    def contexts() -> Contexts:
        forward, replay = create_selective_checkpoint_contexts(policy, **options)
        return forward, replay if log is None else Both(log, replay)

    return contexts


@every_policy
def test_selective_contexts_give_plain_gradients(policy: Any, saved: set[Any]) -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    assert_same_step(
        lambda: matmuls(x, w),
        lambda: compat.checkpoint(matmuls, x, w, use_reentrant=False, context_fn=selective(policy)),
        [x, w],
    )


@every_policy
def test_a_replay_runs_the_ops_that_the_policy_did_not_save(policy: Any, saved: set[Any]) -> None:
    log = OpLog()
    options: dict[str, Any] = {"use_reentrant": False, "early_stop": False}
    contexts = selective(policy, log)
    out = compat.checkpoint(matmuls, leaf(4, 4), leaf(4, 4), context_fn=contexts, **options)
    out.sum().backward()
    run = [op for op in log.ops if op is not aten.detach.default]  # the modes ignore it
    mm, sin, sigmoid = aten.mm.default, aten.sin.default, aten.sigmoid.default
    ops = [mm, sin, mm, sigmoid, aten.exp.default, aten.mul.Tensor]
    expected = [op for op in ops if op not in saved]
    assert run == ([] if policy is save_all else expected)


@pytest.mark.parametrize(("policy", "ops"), [([aten.mm.default], 3), (save_none, 5)])
def test_ops_that_were_saved_do_not_count_as_replayed(policy: Any, ops: int) -> None:
    """Of mm, sin, mm, sigmoid, exp, mul; the last is not needed."""
    contexts = selective(policy)
    with rekindle.observe() as seen:
        out = compat.checkpoint(
            matmuls, leaf(4, 4), leaf(4, 4), use_reentrant=False, context_fn=contexts
        )
        out.sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (1, 1)
    assert seen.total.ops_replayed == ops


def test_saved_ops_of_a_stack_are_as_plain_with_dropout() -> None:
    model, x = Stack(3, drop=0.3), leaf(2, 8)
    contexts = functools.partial(create_selective_checkpoint_contexts, [aten.addmm.default])
    assert_same_step(
        lambda: model(x),
        lambda: model(x, lambda block, x: rekindle.checkpoint(block, x, context_fn=contexts)),
        [x, *model.parameters()],
    )


@pytest.mark.parametrize("create", [create_selective_checkpoint_contexts, torchs_contexts])
def test_a_second_backward_over_selective_contexts_gives_the_same(create: Any) -> None:
    """Field note 10: torch's engine allows one."""
    x, w = leaf(4, 4), leaf(4, 4)
    contexts = functools.partial(create, [aten.mm.default])
    out = compat.checkpoint(matmuls, x, w, use_reentrant=False, context_fn=contexts).sum()
    one = torch.autograd.grad(out, (x, w), retain_graph=True)
    other = torch.autograd.grad(out, (x, w))
    assert all(map(same_bits, one, other))


def mutates_what_is_kept(x: Tensor) -> Tensor:
    return torch.mm(x, x).sin_().exp()


@pytest.mark.parametrize("create", [create_selective_checkpoint_contexts, torchs_contexts])
def test_a_kept_tensor_that_is_changed_in_place_is_kept_as_it_was(create: Any) -> None:
    """Field note 14: torch raises."""
    x = leaf(4, 4)
    contexts = functools.partial(create, [aten.mm.default])
    assert_same_step(
        lambda: mutates_what_is_kept(x),
        lambda: rekindle.checkpoint(mutates_what_is_kept, x, context_fn=contexts),
        [x],
    )


def test_the_modes_by_themselves_refuse_a_kept_tensor_that_was_changed_in_place() -> None:
    contexts = selective([aten.mm.default], OpLog())
    out = rekindle.checkpoint(mutates_what_is_kept, leaf(4, 4), context_fn=contexts)
    with pytest.raises(rekindle.CheckpointError, match="changed in place"):
        out.sum().backward()


def test_the_modes_run_under_torchs_own_checkpoint() -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    assert_same_step(
        lambda: matmuls(x, w),
        lambda: torch_module.checkpoint(
            matmuls, x, w, use_reentrant=False, context_fn=selective([aten.mm])
        ),
        [x, w],
    )


def test_a_subclass_of_torchs_private_modes_runs_on_our_engine() -> None:
    """As xformers has one."""
    asked: list[Any] = []

    class Noting(compat._CachingTorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked.append(func)
            return super().__torch_dispatch__(func, types, args, kwargs)

    def contexts() -> Contexts:
        forward, replay = create_selective_checkpoint_contexts(save_matmuls)
        return Noting(save_matmuls, forward.storage), replay

    x, w = leaf(4, 4), leaf(4, 4)
    assert_same_step(
        lambda: matmuls(x, w),
        lambda: rekindle.checkpoint(matmuls, x, w, context_fn=contexts),
        [x, w],
    )
    assert asked.count(aten.mm.default) == 2


def test_selective_contexts_under_no_grad_are_not_entered() -> None:
    log = OpLog()
    with torch.no_grad():
        compat.checkpoint(
            matmuls, leaf(4, 4), leaf(4, 4), use_reentrant=False, context_fn=lambda: (log, log)
        )
    assert log.ops == []
