"""`rekindle.is_recomputing()` is true in a replay, and nowhere else."""

import pytest
import torch
from torch import Tensor

import rekindle

# What is not a buffer


def test_is_recomputing_guards_a_counter() -> None:
    calls = []

    def region(x: Tensor) -> Tensor:
        if not rekindle.is_recomputing():
            calls.append(1)
        return x.exp().sin()

    x = torch.randn(4, requires_grad=True)
    y = rekindle.checkpoint(region, x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert len(calls) == 1


def test_is_recomputing_is_true_in_replay_only() -> None:
    said = []

    def region(x: Tensor) -> Tensor:
        said.append(rekindle.is_recomputing())
        return x.exp().sin()

    rekindle.checkpoint(region, torch.randn(4, requires_grad=True)).sum().backward()
    assert said == [False, True]
    assert not rekindle.is_recomputing()


def test_is_recomputing_is_true_in_an_inner_region_of_a_replay() -> None:
    said = []

    def inner(x: Tensor) -> Tensor:
        said.append(rekindle.is_recomputing())
        return x.exp().sin()

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(inner, x.cos()).sin()

    rekindle.checkpoint(outer, torch.randn(4, requires_grad=True)).sum().backward()
    assert said.count(False) == 1
    assert said[1:] == [True] * (len(said) - 1)


def test_is_recomputing_is_false_again_after_an_exception_in_replay() -> None:
    def region(x: Tensor) -> Tensor:
        x = x.exp()
        if rekindle.is_recomputing():
            raise KeyError("in replay")
        return x.exp()

    y = rekindle.checkpoint(region, torch.randn(4, requires_grad=True))
    with pytest.raises(KeyError):
        y.sum().backward()
    assert not rekindle.is_recomputing()
