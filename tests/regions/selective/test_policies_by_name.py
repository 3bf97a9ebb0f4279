"""Policies for tensors and functions that `rekindle.name` gave a name."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import rekindle
from rekindle.policies import Policy, at, every, first, keep, named, recompute
from tests.regions.selective.toy_regions import Layer, Wave, product, replayed
from tests.toys import assert_same_step, leaf

aten = torch.ops.aten


def test_a_named_tensor_is_kept() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        return rekindle.name(x.sin().exp(), "wave").cos().exp()

    assert replayed(region, x, named("cave")) == 4
    assert replayed(region, x, named("wave")) == 2
    assert replayed(region, x, named("cave", "w*")) == 2
    assert replayed(region, x, named("wave", fate="recompute")) == 4
    assert replayed(region, x, named("WAVE")) == 4


def test_a_tensor_is_returned_as_it_is_by_name() -> None:
    x = leaf(3)
    assert rekindle.name(x, "x") is x

    def region(x: Tensor) -> Tensor:
        y = x.sin()
        assert rekindle.name(y, "y") is y
        return y

    rekindle.checkpoint(region, x, context_fn=named("y"))


def test_an_input_can_be_named_to_no_effect() -> None:
    x = leaf(3)
    assert_same_step(
        lambda: x.sin().exp(),
        lambda: rekindle.checkpoint(
            lambda x: rekindle.name(x, "x").sin().exp(), x, context_fn=named("x")
        ),
        [x],
    )


def test_a_tensor_changed_after_it_was_named_is_kept_as_it_was() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        y = x.sin()
        rekindle.name(y, "y")
        z = (y + 1).exp()
        y.mul_(2)
        return z * y

    assert_same_step(
        lambda: region(x), lambda: rekindle.checkpoint(region, x, context_fn=named("y")), [x]
    )


def test_a_named_function_has_all_it_does_kept() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        return rekindle.name(Wave().forward, "first")(x).cos().exp()

    assert replayed(region, x, named("second")) == 4
    assert replayed(region, x, named("first")) == 2
    assert replayed(region, x, named("first", fate="recompute") | keep()) == 2


def test_a_function_can_be_named_where_it_is_defined() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        @functools.partial(rekindle.name, name="scaled")
        def scaled(self, x: Tensor, *, by: float) -> Tensor:
            """Scales."""
            return x * self.weight * by

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(x, by=2.0).sin()

    assert (Named.scaled.__name__, Named.scaled.__doc__) == ("scaled", "Scales.")
    assert replayed(Named(), leaf(3), named("scaled")) == 0
    assert replayed(Named(), leaf(3), recompute()) == 2


def test_a_name_ends_with_its_function_also_when_that_fails() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    def region(x: Tensor) -> Tensor:
        with suppress(ZeroDivisionError):
            rekindle.name(fails, "failed")(x)
        return x.sin().exp()

    assert replayed(region, leaf(3), named("failed")) == 2


def test_names_belong_to_a_thread() -> None:
    inside, done = threading.Event(), threading.Event()

    def waits(x: Tensor) -> Tensor:
        inside.set()
        assert done.wait(120)
        return x

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rekindle.name(waits, "named"), leaf(3))
        assert inside.wait(120)
        try:
            assert replayed(product, leaf(3, 3), named("named")) == 3
        finally:
            done.set()
        waiting.result(30)


def test_a_module_that_is_given_a_name_is_still_part_of_its_model() -> None:
    """Or is refused: but its parameters are not left out silently."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = rekindle.name(nn.Linear(3, 3), "up")

    with suppress(TypeError):
        assert len(list(Model().parameters())) == 2


@pytest.mark.parametrize(
    "policy",
    [at("mlp", named("wave")), first(1, named("wave")), every(2, named("wave"))],
    ids=repr,
)
def test_a_named_tensor_is_kept_also_by_a_policy_inside_another(policy: Policy) -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return rekindle.name(x.sin().exp(), "wave").cos().exp()

    layer = Layer()
    layer.mlp = Named()
    assert replayed(layer, leaf(3), named("wave")) == 4
    assert replayed(layer, leaf(3), policy) == 4


def test_a_policy_that_spoke_of_an_op_before_decides_over_a_name() -> None:
    x = leaf(64)

    def region(x: Tensor) -> Tensor:
        for _ in range(8):
            x = rekindle.name(x.sin(), "wave")
        return x

    with rekindle.observe() as seen:
        policy = keep(aten.sin) | named("wave", fate="spill")
        rekindle.checkpoint(region, x, context_fn=policy).sum().backward()
    assert seen.spill.tensors_out == 0
    assert seen.total.ops_replayed == 0
