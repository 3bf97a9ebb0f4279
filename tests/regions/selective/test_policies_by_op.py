"""Ops that policies name: overloads, packets, names, higher-order operators, functions."""

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd

import rekindle
from rekindle.policies import keep, recompute
from tests.regions.selective.toy_regions import Cube, product, replayed
from tests.toys import leaf

flex_attention = torch.ops.higher_order.flex_attention


aten = torch.ops.aten


@pytest.mark.parametrize(
    "op",
    [
        aten.mm,
        aten.mm.default,
        "aten::mm",
        "aten.mm",
        "aten::mm.default",
        [aten.mm],
        (aten.cos, aten.mm),
        {"aten::mm"},
        frozenset([aten.mm.default]),
    ],
    ids=repr,
)
def test_an_op_is_named_in_many_ways(op: Any) -> None:
    assert replayed(product, leaf(4, 4), keep(op)) == 2


def test_a_packet_stands_for_all_its_overloads() -> None:
    x = torch.rand(3, requires_grad=True)
    assert replayed(lambda x: (x**x).sin() * (x**2).sin(), x, keep(aten.pow)) == 2  # both `sin`


def test_an_overload_stands_for_itself_alone() -> None:
    x = torch.rand(3, requires_grad=True)
    policy = keep(aten.pow.Tensor_Scalar)
    assert replayed(lambda x: (x**x).sin() * (x**2).sin(), x, policy) == 3


def test_no_op_at_all_stands_for_every_op() -> None:
    assert replayed(product, leaf(4, 4), keep()) == 0
    assert replayed(product, leaf(4, 4), recompute() | keep()) == 3


def test_an_empty_collection_stands_for_no_op() -> None:
    assert replayed(product, leaf(4, 4), keep([])) == 3


@pytest.mark.parametrize(
    ("op", "ops"),
    [(aten.mm, 1), (aten.sin, 0), (aten.exp, 1)],  # of `sin` backward does not need the result
)
def test_all_ops_but_one_can_be_kept(op: Any, ops: int) -> None:
    assert replayed(product, leaf(4, 4), recompute(op) | keep()) == ops


def test_an_autograd_function_stands_for_all_that_its_forward_does() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        return Cube.apply(x.sin()).exp()

    assert replayed(region, x, recompute()) == 5
    assert replayed(region, x, keep(Cube)) == 1  # `exp`


def test_an_autograd_function_stands_for_the_functions_it_calls_too() -> None:
    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return product(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad * ctx.saved_tensors[0]

    assert replayed(lambda x: Outer.apply(x).exp(), leaf(3, 3), keep(Outer)) == 1


def test_an_autograd_function_is_not_taken_for_another_with_the_same_decorator() -> None:
    """`custom_fwd` puts the same code around every forward."""

    def scaled(by: float) -> Any:
        class Scaled(torch.autograd.Function):
            @staticmethod
            @custom_fwd(device_type="cuda")
            def forward(ctx: Any, x: Tensor) -> Tensor:
                y = x * by
                ctx.save_for_backward(y)
                return y + 1

            @staticmethod
            @custom_bwd(device_type="cuda")
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * ctx.saved_tensors[0]

        return Scaled

    two, three = scaled(2.0), scaled(3.0)
    assert replayed(lambda x: two.apply(x).exp(), leaf(3), keep(two)) == 1
    assert replayed(lambda x: two.apply(x).exp(), leaf(3), keep(three)) == 3


def test_a_higher_order_operator_can_be_named() -> None:
    ctx = rekindle.SelectiveCheckpointContext(is_recompute=False, op=flex_attention)
    assert keep(flex_attention).decide(ctx) is keep().decide(ctx)
    assert keep(aten.mm).decide(ctx) is None
