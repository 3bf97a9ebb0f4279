"""Policies as values: how they compare, print and join."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import rekindle
from rekindle import policies
from rekindle.policies import (
    Policy,
    at,
    every,
    first,
    keep,
    keep_inputs,
    named,
    of,
    offload,
    recompute,
    recompute_cheap,
    spill,
)
from tests.regions.selective.toy_regions import Cube, keep_products, product, replayed, waves
from tests.toys import leaf

flex_attention = torch.ops.higher_order.flex_attention


aten = torch.ops.aten


EQUAL = [
    (keep(aten.mm), keep("aten::mm")),
    (keep(aten.mm), keep([aten.mm])),
    (keep(aten.mm, aten.addmm), keep({aten.addmm}, (aten.mm,))),
    (keep(aten.mm.default), keep("aten::mm.default")),
    (keep(flex_attention), keep("higher_order::flex_attention")),
    (keep(Cube), keep([Cube])),
    (of([aten.mm]), keep(aten.mm)),
    (of(keep_products), of(keep_products)),
    (at("mlp", "offload"), at("mlp", offload())),
    (named("a", "b"), named("a", "b", fate="keep")),
    (keep_inputs(aten.mm), keep_inputs(["aten::mm"])),
    (first(2, keep()), first(2, keep())),
    (every(2, [aten.mm]), every(2, keep(aten.mm))),
    (keep() | (offload() | spill()), (keep() | offload()) | spill()),
]

DIFFERENT = [
    keep(),
    keep([]),
    recompute(),
    offload(),
    spill(),
    keep(aten.mm),
    keep(aten.mm.default),
    offload(aten.mm),
    keep_inputs(aten.mm),
    keep(Cube),
    at("mlp", keep()),
    at("attn", keep()),
    named("a"),
    named("a", fate="spill"),
    first(1, keep()),
    first(2, keep()),
    every(1, keep()),
    every(2, keep()),
    keep(aten.mm) | offload(),
    offload() | keep(aten.mm),
    of(keep_products),
    recompute_cheap,
]


@pytest.mark.parametrize(("one", "other"), EQUAL, ids=repr)
def test_policies_that_say_the_same_are_equal_and_have_the_same_hash(
    one: Policy, other: Policy
) -> None:
    assert one == other
    assert hash(one) == hash(other)


def test_policies_that_say_different_things_differ() -> None:
    assert len(set(DIFFERENT)) == len(DIFFERENT)


@pytest.mark.parametrize("policy", [*DIFFERENT, policies.keep_matmuls_and_attention], ids=repr)
def test_a_copy_of_a_policy_equals_it(policy: Policy) -> None:
    assert copy.deepcopy(policy) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(
    "policy",
    [
        keep(),
        keep("aten::mm"),
        keep(aten.mm.default),
        offload(aten.mm, aten.addmm),
        keep(Cube),
        keep(flex_attention),
        keep_inputs(aten.mm),
        at("layers.*.mlp", "keep"),
        at("mlp", first(2, keep()) | spill()),
        named("a", "b_*", fate="offload"),
        every(3, recompute()),
        at("a", "recompute") | named("b") | keep(),
        recompute_cheap,
        of(keep_products),
    ],
    ids=repr,
)
def test_a_policy_prints_as_the_code_that_makes_it(policy: Policy) -> None:
    assert of(eval(repr(policy))) == policy


def test_an_overload_prints_otherwise_than_all_overloads() -> None:
    assert repr(keep(aten.mm)) != repr(keep(aten.mm.default))


def test_policies_print_in_the_order_in_which_they_are_asked() -> None:
    assert repr(named("a") | keep() | named("b")) == (
        "named('a', fate='keep') | keep() | named('b', fate='keep')"
    )


def test_the_first_policy_to_speak_decides() -> None:
    w = leaf(4, 4)
    assert replayed(product, w, keep(aten.mm) | recompute(aten.mm)) == 2
    assert replayed(product, w, recompute(aten.mm) | keep(aten.mm)) == 3


def test_what_no_policy_speaks_of_is_recomputed() -> None:
    assert replayed(product, leaf(4, 4), keep(aten.mm) | keep(aten.cos)) == 2


@pytest.mark.parametrize(
    "policy",
    [
        keep_products | recompute(),
        recompute(aten.sin) | of(keep_products),
        recompute(aten.sin) | keep_products,
        [aten.mm] | recompute(),
        recompute(aten.sin) | [aten.mm],
        {aten.mm} | recompute(),
        (aten.mm,) | recompute(),
    ],
    ids=repr,
)
def test_functions_and_lists_are_joined_as_policies_are(policy: Policy) -> None:
    assert replayed(product, leaf(4, 4), policy) == 2


def test_a_function_that_returns_none_has_no_opinion() -> None:
    assert replayed(product, leaf(4, 4), keep_products | keep("aten::exp")) == 0


def test_recompute_cheap_runs_no_product_again() -> None:
    w = leaf(4, 4)
    assert replayed(product, w, recompute_cheap) == 2
    assert replayed(lambda w: torch.softmax(w @ w, 0).float().sum(0).exp(), w, recompute_cheap) == 3


def test_recompute_cheap_speaks_of_every_op() -> None:
    assert recompute_cheap | keep(aten.sin) != recompute_cheap
    assert replayed(waves, leaf(3), recompute_cheap | keep(aten.sin)) == 5


def test_a_policy_may_be_a_class_of_the_users_own() -> None:
    class Large(Policy):
        def decide(self, ctx: rekindle.SelectiveCheckpointContext) -> Any:
            return keep().decide(ctx) if ctx.nbytes > 12 else None

    assert replayed(lambda x: torch.stack([x.sin(), x]).exp().sin(), leaf(3), Large()) == 0
    assert replayed(lambda x: x.sin().exp().sin(), leaf(3), Large() | recompute()) == 2


def test_a_class_of_the_users_own_may_use_the_names_of_before() -> None:
    class Large(type(keep())):  # type: ignore[misc]
        def fate(self, ctx: rekindle.SelectiveCheckpointContext) -> Any:
            return super().fate(ctx) if ctx.nbytes > 12 else None

    large = Large(keep().then, None)  # type: ignore[attr-defined]
    assert replayed(lambda x: torch.stack([x.sin(), x]).exp().sin(), leaf(3), large) == 0
    assert replayed(lambda x: x.sin().exp().sin(), leaf(3), large | recompute()) == 2


class _FromBefore:
    """Decides under the names that policies had before, as a base that is no policy."""

    def fate(self, ctx: rekindle.SelectiveCheckpointContext) -> Any:
        return keep("aten::mm").fate(ctx)

    def fate_of_name(self, name: str, ctx: rekindle.SelectiveCheckpointContext) -> Any:
        return super().fate_of_name(name, ctx)  # type: ignore[misc]


def test_a_class_may_have_the_names_of_before_from_a_base_that_is_no_policy() -> None:
    class Mixed(_FromBefore, Policy):
        pass

    assert replayed(product, leaf(3, 3), Mixed()) == 2


def test_a_class_that_uses_the_names_of_before_may_call_those_of_its_bases() -> None:
    class Mixed(_FromBefore, Policy):
        def fate(self, ctx: rekindle.SelectiveCheckpointContext) -> Any:
            return super().fate(ctx)

    class Narrower(Mixed):
        def fate(self, ctx: rekindle.SelectiveCheckpointContext) -> Any:
            return super().fate(ctx)

    policy = Narrower()
    assert replayed(product, leaf(3, 3), policy) == 2
    assert policy.decide_named("a", None) is None  # type: ignore[arg-type]


def test_policies_answer_to_the_names_of_before() -> None:
    assert named("a").fate_of_name("a", None) is named("a").decide_named("a", None)  # type: ignore[arg-type]
    assert keep().fate_of_name("a", None) is None  # type: ignore[arg-type]
