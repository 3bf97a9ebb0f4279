"""Copies and pickles of a model with strategies."""

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.modules.applying import (
    applied,
    assert_as_plain,
    every_kind_and_nested,
    managed,
    replays_in,
)
from tests.toys import Mlp, gradients, leaf, same_bits


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def through_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]


ways_to_copy = pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, through_pickle, through_torch], ids=["deepcopy", "pickle", "save"]
)


@ways_to_copy
@every_kind_and_nested
def test_a_copy_has_the_strategies_and_gradients_of_its_own(what: Any, duplicate: Any) -> None:
    model, x = applied(what), leaf()
    other = duplicate(model)
    assert managed(other) == managed(model)
    for parameter in other.parameters():
        parameter.data *= 2
    model_grads = gradients(lambda: model(x), model.parameters())[1]
    assert_as_plain(other, x)
    assert all(p.grad is not None for p in other.parameters())
    assert all(same_bits(p.grad, g) for p, g in zip(model.parameters(), model_grads, strict=True))


@ways_to_copy
def test_removing_from_a_copy_leaves_the_first_as_it_is(duplicate: Any) -> None:
    model = applied()
    rekindle.remove(duplicate(model))
    assert managed(model) == ["blocks.0", "blocks.1"]


@ways_to_copy
def test_removing_from_the_first_leaves_a_copy_as_it_is(duplicate: Any) -> None:
    model = applied()
    other = duplicate(model)
    rekindle.remove(model)
    assert replays_in(lambda: other(leaf()).sum().backward()) == 2


class Scaled(nn.Module):
    """Its scale is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * self.scale  # type: ignore[no-any-return]


def test_strategies_can_be_removed_from_a_shallow_copy() -> None:
    model = Scaled()
    rekindle.apply(model, "recompute")
    other = copy.copy(model)
    rekindle.remove(other)
    assert "forward" not in vars(other)


def test_a_model_is_freed_without_the_garbage_collector() -> None:
    """A parameter on a GPU must not wait for it."""
    gc.collect()
    gc.disable()
    try:
        model = applied()
        model(leaf()).sum().backward()
        dead = [weakref.ref(module) for module in model.modules()]
        del model
        assert [ref() for ref in dead] == [None] * len(dead)
    finally:
        gc.enable()


@ways_to_copy
def test_a_copy_runs_where_the_folder_that_it_spills_to_does_not_exist(
    duplicate: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "spilled"
    folder.mkdir()
    model = applied(rekindle.offload(tier="disk", quota=1.0, min_bytes=0, directory=folder))
    folder.rmdir()
    other = duplicate(model)
    assert managed(other) == managed(model)
    with pytest.warns(UserWarning, match="There is no room"):
        assert_as_plain(other, leaf())
