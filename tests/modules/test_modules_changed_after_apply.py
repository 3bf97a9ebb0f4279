"""Other things that people do to modules which have strategies."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, parametrize

import rekindle
from tests.modules.applying import (
    applied,
    assert_as_plain,
    every_kind_and_nested,
    managed,
    replays_in,
)
from tests.toys import Block, Mlp, Stack, assert_same_step, gradients, leaf, same_bits


@every_kind_and_nested
def test_functional_call_has_gradients_for_what_it_is_given(what: Any) -> None:
    model, x = applied(what), leaf()
    plain = copy.deepcopy(model)
    rekindle.remove(plain)
    given = {
        name: (parameter.detach() * 2).requires_grad_()
        for name, parameter in model.named_parameters()
    }
    assert_same_step(
        lambda: functional_call(plain, given, (x,)),
        lambda: functional_call(model, given, (x,)),
        [x, *given.values()],
    )


@every_kind_and_nested
def test_per_sample_gradients_are_the_plain_ones(what: Any) -> None:
    model, x = applied(what), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    rekindle.remove(plain)

    def per_sample(this: nn.Module) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
            return functional_call(this, parameters, (sample,)).sum()  # type: ignore[no-any-return]

        parameters = {n: p.detach() for n, p in this.named_parameters()}
        return vmap(grad(loss), in_dims=(None, 0))(parameters, x)  # type: ignore[no-any-return]

    one, other = per_sample(plain), per_sample(model)
    assert all(torch.equal(one[name], other[name]) for name in one)


@every_kind_and_nested
@pytest.mark.parametrize("when", ["before", "after"])
def test_parametrized_modules_have_the_plain_gradients(what: Any, when: str) -> None:
    model = Stack(2)
    if when == "after":
        rekindle.apply(model, what)
    parametrizations.weight_norm(model.get_submodule("blocks.0.mlp.up"))
    if when == "before":
        rekindle.apply(model, what)
    assert parametrize.is_parametrized(model.get_submodule("blocks.0.mlp.up"))
    x = leaf()
    leaves = [x, *model.parameters()]
    found = gradients(lambda: model(x), leaves)[1]
    rekindle.remove(model)
    assert all(map(same_bits, found, gradients(lambda: model(x), leaves)[1]))


def test_a_module_parametrized_after_apply_keeps_its_strategy() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    rekindle.apply(model, {"0": "recompute"})
    parametrizations.weight_norm(model[0])
    assert replays_in(lambda: model(leaf()).sum().backward()) == 1
    rekindle.remove(model)
    assert "forward" not in vars(model[0])


@every_kind_and_nested
def test_tied_weights_have_the_plain_gradients(what: Any) -> None:
    model = Stack(2)
    one, other = (model.get_submodule(f"blocks.{i}.mlp.up") for i in range(2))
    other.weight = one.weight
    rekindle.apply(model, what)
    assert_as_plain(model, leaf())


def test_a_lazy_module_becomes_what_it_is_to_be() -> None:
    model, x = nn.Sequential(nn.LazyLinear(8), nn.ReLU()), leaf()
    rekindle.apply(model, {"0": "recompute"})
    model(x)
    assert type(model[0]) is nn.Linear
    assert_as_plain(model, x)


@every_kind_and_nested
def test_a_submodule_replaced_after_apply_is_the_one_that_runs(what: Any) -> None:
    model, x = applied(what), leaf()
    model.blocks[0].mlp = Mlp()
    assert_as_plain(model, x)


def test_a_block_replaced_after_apply_has_no_strategy() -> None:
    model = applied()
    model.blocks[0] = Block()
    assert replays_in(lambda: model(leaf()).sum().backward()) == 2 - 1


def test_a_block_taken_to_another_model_takes_its_strategy_along() -> None:
    model = applied()
    other = nn.Sequential(model.blocks[0])
    assert replays_in(lambda: other(leaf()).sum().backward()) == 1
    rekindle.remove(other)
    assert managed(model) == ["blocks.1"]


def test_a_part_can_be_applied_to_and_the_model_after_it() -> None:
    model = Stack(2)
    rekindle.apply(model.blocks[0], {"mlp": "recompute"})
    assert managed(model) == ["blocks.0.mlp"]
    rekindle.apply(model, "recompute")
    assert managed(model) == ["blocks.0", "blocks.1"]


def test_a_part_can_be_applied_to_after_the_model() -> None:
    model = applied()
    rekindle.apply(model.blocks[0], {"mlp": "recompute"})
    assert managed(model) == ["blocks.0.mlp", "blocks.1"]
    assert_as_plain(model, leaf())


def test_optimizers_made_before_train_the_same_parameters() -> None:
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    rekindle.apply(model, "recompute")
    model(leaf()).sum().backward()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
