"""Blocks that differ in what they were set to are measured each; numbers of layers do not count."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.planner.trace.block_signature import settings_of
from tests.toys import Block

pytest.importorskip("scipy")


class Settled(nn.Module):
    """A block with settings, some of them in a part of it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(settings.pop("p", 0.1))
        self.part = nn.Identity()
        for name, value in settings.items():
            setattr(self.part if name == "inside" else self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.drop(self.linear(x)))


def kinds(*settings: dict[str, Any]) -> list[int]:
    model = nn.Sequential(*(Settled(**each) for each in settings))
    profile = rekindle.profile(model, torch.randn(4, 8).requires_grad_())
    return [index for _, index in profile.order]


def distinct(*blocks: nn.Module) -> int:
    traits = settings_of({f"layers.{i}": block for i, block in enumerate(blocks)})
    return len({repr(each) for each in traits.values()})


def test_blocks_with_other_rates_are_distinct() -> None:
    assert kinds({"p": 0.1}, {"p": 0.0}, {"p": 0.1}) == [0, 1, 0]


def test_rates_in_the_toy_blocks_count_too() -> None:
    model = nn.Sequential(Block(8, 0.0), Block(8, 0.5))
    assert len(rekindle.profile(model, torch.randn(4, 8).requires_grad_()).blocks) == 2


OTHERS: dict[str, tuple[Any, Any]] = {
    "a number": (1, 2),
    "a float": (0.5, 0.25),
    "text": ("gelu", "relu"),
    "a flag": (True, False),
    "nothing": (None, 1),
    "a tuple": ((1, 1), (2, 2)),
    "a tuple in a tuple": ((1, ("a", None)), (1, ("b", None))),
}


@pytest.mark.parametrize("name", ["setting", "inside", "_private"])
@pytest.mark.parametrize(("one", "other"), OTHERS.values(), ids=OTHERS)
def test_blocks_with_other_plain_attributes_are_distinct(name: str, one: Any, other: Any) -> None:
    assert distinct(Settled(**{name: one}), Settled(**{name: other})) == 2
    assert distinct(Settled(**{name: one}), Settled(**{name: one})) == 1


def test_other_attributes_do_not() -> None:
    assert distinct(Settled(setting=object()), Settled(setting=[1])) == 1


def test_blocks_in_other_modes_are_distinct() -> None:
    assert distinct(Settled(), Settled().eval()) == 2


@pytest.mark.parametrize("start", [0, 1, 5])
def test_a_number_of_the_block_does_not(start: int) -> None:
    assert kinds(*({"inside": start + i} for i in range(4))) == [0, 0, 0, 0]


def test_two_strides_are_no_numbers_of_blocks() -> None:
    assert kinds({"stride": 1}, {"stride": 2}) == [0, 1]


def test_numbers_of_blocks_count_from_0_in_two_blocks_too() -> None:
    assert kinds({"layer_idx": 0}, {"layer_idx": 1}) == [0, 0]


def test_flags_do_not_number_blocks() -> None:
    assert kinds({"first": False}, {"first": True}) == [0, 1]


def test_dilations_that_double_are_no_numbers_of_blocks() -> None:
    assert kinds(*({"dilation": 2**i} for i in range(3))) == [0, 1, 2]
