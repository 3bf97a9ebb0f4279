"""Policies for the modules at some paths."""

import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from rekindle.policies import Policy, at, keep, recompute
from tests.regions.selective.toy_regions import Layer, Net, replayed, replayed_in
from tests.toys import leaf

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("pattern", "ops"),
    [
        ("layers", 0),
        ("layers.*", 0),
        ("layers.0", 4),
        ("layers.[1-9]", 4),
        ("lay*.0", 4),
        ("0", 4),
        ("mlp", 4),
        ("layers.*.mlp", 4),
        ("*.attn", 4),
        ("layers.1.attn", 6),
        ("1.mlp", 6),
        ("layers.mlp", 8),
        ("layers.2", 8),
        ("ml", 8),
        ("Layers", 8),
        ("attn.mlp", 8),
        ("layers.0.mlp.sin", 8),
    ],
)
def test_a_pattern_names_parts_of_a_modules_path(pattern: str, ops: int) -> None:
    assert replayed_in(Net(), at(pattern, keep())) == ops


def test_paths_begin_at_the_outermost_module_that_is_called() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

        def forward(self, x: Tensor, context_fn: Any) -> Tensor:
            return self.model(x, context_fn)

    assert replayed_in(Outer(), at("model.layers.0.mlp", keep())) == 6
    assert replayed_in(Outer(), at("layers.0.mlp", keep())) == 6
    assert replayed_in(Net(), at("model.layers.0.mlp", keep())) == 8
    assert replayed(Layer(), leaf(3), at("layers.*.mlp", keep())) == 4
    assert replayed(Layer(), leaf(3), at("mlp", keep())) == 2


@pytest.mark.parametrize("wrap", [functools.partial, lambda layer: lambda x: layer(x).sum()])
def test_a_module_has_its_path_however_the_region_calls_it(wrap: Any) -> None:
    assert replayed(wrap(Layer()), leaf(3), at("mlp", keep())) == 2


def test_a_module_with_hooks_has_its_path() -> None:
    net = Net()
    net.layers[0].mlp.register_forward_hook(lambda *args: None)
    net.layers[0].mlp.register_full_backward_hook(lambda *args: None)
    assert replayed_in(net, at("layers.0.mlp", keep())) == 6


def test_a_module_that_was_moved_has_its_new_path() -> None:
    net = Net()
    assert replayed_in(net, at("layers.0", keep())) == 4
    net.layers = net.layers[1:]
    assert replayed_in(net, at("layers.0", keep())) == 0
    assert replayed_in(net, at("layers.1", keep())) == 4


@pytest.mark.parametrize(
    ("policy", "ops"),
    [
        (at("mlp", "keep"), 2),
        (at("mlp", "recompute") | keep(), 2),
        (at("mlp", keep(aten.sin)), 3),
        (at("mlp", [aten.exp]), 2),
        (at("mlp", lambda ctx, op, x: op is aten.exp.default), 2),
        (at("mlp", recompute(aten.exp)) | keep(), 1),
        (at("*", at("mlp", keep())), 2),
        (at("mlp", at("attn", keep())), 4),
    ],
    ids=repr,
)
def test_a_module_gets_a_decision_or_a_policy_of_its_own(policy: Policy, ops: int) -> None:
    """`exp` of `mlp` can be made again from a `sin` that is kept."""
    assert replayed(Layer(), leaf(3), policy) == ops
