"""Saved-tensor hooks of others around and inside regions under a policy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import rekindle
from rekindle.policies import Policy, first, keep, recompute
from tests.regions.selective.toy_regions import LENGTH, eight_waves
from tests.toys import assert_same_step, leaf, same_bits

aten = torch.ops.aten


class Hooks(saved_tensors_hooks):
    """Hooks that hold each tensor as a double, and count."""

    def __init__(self) -> None:
        self.packed: list[Tensor] = []
        self.unpacked = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> Tensor:
        self.packed.append(x)
        return x.double() + 1

    def _unpack(self, held: Tensor) -> Tensor:
        self.unpacked += 1
        return (held - 1).float()


def through(hooks: Any, function: Callable[..., Any], x: Tensor, policy: Policy) -> Tensor:
    with hooks:
        out: Tensor = rekindle.checkpoint(function, x, context_fn=policy)
    return out


def test_what_is_kept_passes_once_through_hooks_around_the_region() -> None:
    hooks, x = Hooks(), leaf(3)
    through(hooks, eight_waves, x, first(3, keep())).sum().backward()
    assert len([packed for packed in hooks.packed if packed is not x]) == 3


def test_what_is_recomputed_does_not_pass_through_hooks_around_the_region() -> None:
    hooks, x = Hooks(), leaf(3)
    through(hooks, eight_waves, x, recompute()).sum().backward()
    assert [packed for packed in hooks.packed if packed is not x] == []


def test_what_is_kept_comes_back_from_hooks_as_they_give_it() -> None:
    """Half a number is lost: the gradient is that of what the hooks give."""
    x = torch.full((3,), 1.5, requires_grad=True)
    hooks = saved_tensors_hooks(lambda x: x.detach().floor(), lambda x: x)
    out = through(hooks, lambda x: (x * 1.0).sin(), x, keep())
    (found,) = torch.autograd.grad(out.sum(), x)
    assert same_bits(found, torch.ones(3).cos())


def test_hooks_that_save_on_the_cpu_may_be_around_the_region(decision: Policy) -> None:
    x = leaf(3)
    assert_same_step(
        lambda: eight_waves(x), lambda: through(save_on_cpu(), eight_waves, x, decision), [x]
    )


def test_hooks_inside_the_region_get_what_is_saved_there(decision: Policy) -> None:
    x, hooks = leaf(3), Hooks()

    def region(x: Tensor) -> Tensor:
        y = x.sin().exp()
        with save_on_cpu():
            y = y.sin().exp()
        with hooks:
            y = y.tanh()
        return y.sin().exp()

    hooks.packed.clear()
    rekindle.checkpoint(region, x, context_fn=decision).sum().backward()
    assert len(hooks.packed) == 1


@pytest.mark.parametrize("policy", [keep(), rekindle.policies.named("wave") | recompute()])
def test_ops_of_hooks_are_none_of_the_regions(policy: Policy) -> None:
    asked: list[Any] = []

    def noting(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> None:
        asked.append(op)

    def region(x: Tensor) -> Tensor:
        return rekindle.name(x.sin(), "wave").cos().sin()

    through(Hooks(), region, leaf(3), noting | policy)
    assert asked == [aten.sin.default, aten.cos.default, aten.sin.default]


@pytest.mark.usefixtures("new_offloaders", "written_at_once")
def test_what_is_kept_inside_an_offload_context_is_offloaded() -> None:
    with rekindle.observe() as seen:
        with rekindle.offload(tier="disk", quota=1.0, min_bytes=1):
            out = rekindle.checkpoint(eight_waves, leaf(64), context_fn=first(LENGTH - 1, keep()))
        out.sum().backward()
    assert seen.spill.tensors_out == LENGTH - 1 - 2
    assert seen.total.ops_replayed == 0
