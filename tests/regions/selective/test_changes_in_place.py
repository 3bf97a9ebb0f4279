"""Tensors of a region under a policy that are changed in place, inside and after it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import rekindle
from rekindle import policies
from rekindle.policies import keep, recompute
from tests.regions.selective.toy_regions import SOME_POLICIES
from tests.toys import assert_same_step, leaf, same_bits

aten = torch.ops.aten


@pytest.mark.parametrize("policy", SOME_POLICIES, ids=repr)
def test_a_kept_result_may_be_changed_in_place_in_the_region(policy: policies.Policy) -> None:
    """Field note 14."""
    x = leaf(4)

    def region(x: Tensor) -> Tensor:
        y = x.sin()
        z = (y + 1).exp()
        y.mul_(2).add_(1)
        y[1:3] = 0
        return z * y.sin()

    run = functools.partial(rekindle.checkpoint, region, x, context_fn=policy)
    assert_same_step(lambda: region(x), run, [x])


@pytest.mark.parametrize("policy", SOME_POLICIES, ids=repr)
def test_a_view_of_a_kept_result_may_be_changed_in_place(policy: policies.Policy) -> None:
    """Field note 14. As rotary positions are often put into queries."""
    linear, x = nn.Linear(4, 4), leaf(2, 3, 4)

    def region(x: Tensor) -> Tensor:
        heads = linear(x.sin()).view(2, 3, 2, 2).transpose(1, 2)
        gate = (heads + 1).sigmoid()
        heads.mul_(2)
        return heads.exp() * gate

    run = functools.partial(rekindle.checkpoint, region, x, context_fn=policy)
    assert_same_step(lambda: region(x), run, [x, *linear.parameters()])


def with_second(w: Tensor) -> tuple[Tensor, Tensor]:
    """The second result is made from the first, which autograd itself does not save."""
    first = w @ w
    return first, (first + 1).exp()


def test_a_kept_result_changed_after_the_region_is_told_with_the_op_that_made_it() -> None:
    """Field note 14."""
    w = leaf(4, 4)
    one, two = rekindle.checkpoint(with_second, w, context_fn=keep(aten.mm))
    one.add_(1)
    with pytest.raises(rekindle.CheckpointError, match=r"aten\.mm.*changed in place.*clone"):
        (one.sum() + two.sum()).backward()


def test_a_recomputed_result_may_be_changed_after_the_region() -> None:
    """Field note 14."""
    w = leaf(4, 4)

    def step(run: Callable[..., Any]) -> Any:
        one, two = run(with_second, w)
        return one.add_(1), two

    checkpoint = functools.partial(rekindle.checkpoint, context_fn=recompute())
    assert_same_step(lambda: step(lambda f, w: f(w)), lambda: step(checkpoint), [w])


def test_an_input_changed_after_the_region_is_told() -> None:
    """Field note 14."""
    x = leaf(4) * 1
    out = rekindle.checkpoint(lambda x: (x + 1).exp(), x, context_fn=recompute())
    x.zero_()
    with pytest.raises(rekindle.CheckpointError, match=r"outside the region.*changed in place"):
        out.sum().backward()


def test_a_change_that_plain_autograd_refuses_does_no_harm_to_what_is_made_again() -> None:
    """Field note 14. `sin` needs what is changed; made again, it is as `sin` saw it."""
    x = leaf(4)

    def region(x: Tensor, double: Callable[[Tensor], Tensor]) -> Tensor:
        y = x + 1
        return y.sin() * double(y)

    with pytest.raises(RuntimeError, match="inplace operation"):
        region(x, lambda y: y.mul_(2)).sum().backward()
    (expected,) = torch.autograd.grad(region(x, lambda y: y * 2).sum(), x)
    out = rekindle.checkpoint(region, x, lambda y: y.mul_(2), context_fn=recompute())
    assert same_bits(torch.autograd.grad(out.sum(), x)[0], expected)
