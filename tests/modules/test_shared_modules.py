"""`apply` on models that use one module in several places."""

from typing import Any

import pytest
from torch import Tensor, nn

import rekindle
from tests.modules.applying import (
    assert_as_before,
    assert_refused,
    every_kind,
    managed,
    replays_of,
    seen_of,
)
from tests.toys import Block, Mlp, leaf


class Twice(nn.Module):
    """One block under two names, and called under each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


@every_kind
def test_a_module_under_two_names_has_the_plain_gradients(what: Any) -> None:
    model, x = Twice(), leaf()
    assert_as_before(model, {"first": what}, lambda: model(x), x)


@pytest.mark.parametrize("pattern", ["first", "second", "*"])
def test_a_module_under_two_names_is_a_region_in_each_call(pattern: str) -> None:
    model = Twice()
    rekindle.apply(model, {pattern: "recompute"})
    seen = seen_of(lambda: model(leaf()).sum().backward())
    assert (seen.total.forwards, seen.total.replays) == (2, 2)


def test_a_module_under_two_names_is_shown_once() -> None:
    applied = rekindle.apply(Twice(), {"*": "recompute"})
    assert str(applied).count("Block") == 1


def test_two_strategies_for_one_module_are_refused() -> None:
    what = {"first": "recompute", "second": "offload"}
    assert_refused(
        ValueError, "first and second are one module.*recompute and offload", Twice(), what
    )


def test_one_strategy_given_twice_to_one_module_is_fine() -> None:
    model = Twice()
    rekindle.apply(model, {"first": "recompute", "second": "recompute"})
    assert replays_of(model) == 2


def test_a_strategy_of_a_shared_module_can_be_removed() -> None:
    model = Twice()
    rekindle.apply(model, {"*": "recompute"})
    rekindle.remove(model)
    assert "forward" not in vars(model.first)


class Lists(nn.Module):
    """Two lists of blocks that have one in common."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleList([Block(), Block()])
        self.b = nn.ModuleList([self.a[0], Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.a, *self.b):
            x = block(x)
        return x


def test_a_block_in_two_lists_is_one_region_in_each_call() -> None:
    model = Lists()
    rekindle.apply(model, "recompute")
    assert replays_of(model) == 4


def test_a_block_in_two_lists_is_as_before_after_remove() -> None:
    model = Lists()
    rekindle.apply(model, "recompute")
    rekindle.remove(model)
    assert managed(model) == []
    assert all("forward" not in vars(module) for module in model.modules())


class OneMlp(nn.Module):
    """Two blocks that share their Mlp."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.blocks[1].mlp = self.blocks[0].mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


@every_kind
def test_a_part_that_two_blocks_share_has_the_plain_gradients(what: Any) -> None:
    model, x = OneMlp(), leaf()
    strategies = {"blocks.*": "recompute", "blocks.*.mlp": what}
    assert_as_before(model, strategies, lambda: model(x), x)


def test_a_part_that_two_blocks_share_has_its_strategy_in_both() -> None:
    shared, apart = OneMlp(), OneMlp()
    apart.blocks[1].mlp = Mlp()
    strategies = {"blocks.*": "recompute", "blocks.*.mlp": "keep"}
    found = []
    for model in (shared, apart):
        rekindle.apply(model, strategies)
        found.append(seen_of(lambda model=model: model(leaf()).sum().backward()).total)  # type: ignore[misc]
    assert found[0] == found[1]


class Again(nn.Module):
    """Calls one block several times."""

    def __init__(self, times: int = 3) -> None:
        super().__init__()
        self.block = Block(drop=0.3)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.block(x)
        return x


@every_kind
def test_a_module_called_several_times_has_the_plain_gradients(what: Any) -> None:
    model, x = Again(), leaf()
    assert_as_before(model, {"block": what}, lambda: model(x), x)


def test_a_module_called_several_times_is_a_region_in_each_call() -> None:
    model = Again()
    rekindle.apply(model, {"block": "recompute"})
    assert replays_of(model) == 3


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        out = self.mlp(x)
        return self(out, depth - 1) if depth else out  # type: ignore[no-any-return]


@every_kind
def test_a_module_that_calls_itself_has_the_plain_gradients(what: Any) -> None:
    model, x = Recursive(), leaf()
    assert_as_before(model, {"": what}, lambda: model(x), x)
