"""Blocks are one kind if they run the same ops on the same shapes, whatever they were set to."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.planner.trace.block_signature import has_signature
from tests.toys import Block

pytest.importorskip("scipy")


class Settled(nn.Module):
    """A block whose settings decide what it runs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(settings.pop("p", 0.1))
        self.stride, self.branch, self.heads = 1, False, 2
        vars(self).update(settings)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).unflatten(-1, (self.heads, -1))
        out = self.drop(heads).relu().flatten(-2)
        if self.branch:
            out = out.roll(1, 0)
        return out[:: self.stride].repeat_interleave(self.stride, 0)


def kinds(*settings: dict[str, Any], **options: Any) -> list[int]:
    """The index of each block's kind, in a model of blocks that were set so."""
    return kinds_of(nn.Sequential(*(Settled(**each) for each in settings)), **options)


def kinds_of(model: nn.Module, **options: Any) -> list[int]:
    profile = rekindle.profile(model, torch.randn(4, 8).requires_grad_(), **options)
    return [index for _, index in profile.order]


ALIKE: dict[str, tuple[dict[str, Any], ...]] = {
    "rates": ({"p": 0.1}, {"p": 0.2}, {"p": 0.3}),
    "numbers of blocks": ({"layer": 0}, {"layer": 1}),
    "names": ({"word": "gelu"}, {"word": "relu"}),
}


@pytest.mark.parametrize("settings", ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize("options", [{}, {"device": "meta", "like": "cpu"}], ids=["run", "fake"])
def test_settings_that_change_no_op_make_no_block_distinct(
    settings: tuple[dict[str, Any], ...], options: dict[str, Any]
) -> None:
    assert kinds(*settings, **options) == [0] * len(settings)


OTHERS: dict[str, tuple[dict[str, Any], ...]] = {
    "no dropout": ({"p": 0.1}, {"p": 0.0}, {"p": 0.2}),
    "a branch": ({}, {"branch": True}, {}),
    "shapes inside": ({}, {"heads": 4}, {}),
    "strides": ({}, {"stride": 2}, {}),
}


@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("options", [{}, {"device": "meta", "like": "cpu"}], ids=["run", "fake"])
def test_settings_that_change_an_op_or_a_shape_make_blocks_distinct(
    settings: tuple[dict[str, Any], ...], options: dict[str, Any]
) -> None:
    assert kinds(*settings, **options) == [0, 1, 0]


def test_blocks_in_other_modes_are_distinct() -> None:
    assert kinds_of(nn.Sequential(Settled(), Settled().eval())) == [0, 1]


def test_blocks_whose_parameters_are_frozen_are_distinct() -> None:
    assert kinds_of(nn.Sequential(Block(8, 0.1), Block(8, 0.1).requires_grad_(False))) == [0, 1]


def test_casts_that_autocast_has_in_its_cache_make_no_block_distinct() -> None:
    block = Settled()
    model = nn.Sequential(block, Settled(), Settled())
    model[1].linear = block.linear
    x = torch.randn(4, 8)

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = model(x).float().sum()
        return out

    profile = rekindle.profile(model, step)
    # The first block is given float32. The second casts nothing, the third its own parameters.
    assert [index for _, index in profile.order] == [0, 1, 1]


class Routed(nn.Module):
    """A block that sends each row to one of two experts, by the row's values."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert, chosen in zip(self.experts, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
            rows = chosen.nonzero().squeeze(-1)
            for row in rows:
                out = out.index_add(0, row[None], expert(x[row[None]]))
        return out + x


def test_blocks_that_route_rows_in_other_ways_are_one_kind() -> None:
    torch.manual_seed(0)
    assert kinds_of(nn.Sequential(*(Routed() for _ in range(4)))) == [0, 0, 0, 0]


def test_an_index_by_numbers_does_not_end_what_is_compared() -> None:
    class Gathers(Settled):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[torch.arange(4)])

    assert kinds_of(nn.Sequential(Gathers(), Gathers(branch=True))) == [0, 1]


def test_a_signature_is_class_parameters_and_inputs() -> None:
    profile = rekindle.profile(nn.Sequential(Settled(), Settled()), torch.randn(4, 8))
    parameters = "linear.weight float32[8, 8] that learns, linear.bias float32[8] that learns"
    assert [block.signature for block in profile.blocks] == [
        f"Settled({parameters}) of (('float32[4, 8]',), {{}})",
        f"Settled({parameters}) of (('float32[4, 8] that learns',), {{}})",
    ]


SIGNATURE = "Block(a float32[2]) of (('float32[4]',), {})"


@pytest.mark.parametrize(
    ("known", "is_same"),
    [
        (SIGNATURE, True),
        ("Block(a float32[2], p=0.1, part.training=True) of (('float32[4]',), {})", True),
        ("Block(a float32[2], b float32[2]) of (('float32[4]',), {})", False),
        ("Block(a float32[2]) of (('float32[5]',), {})", False),
        ("Block(a float32[2], p=0.1) of (('float32[5]',), {})", False),
        ("Other(a float32[2], p=0.1) of (('float32[4]',), {})", False),
    ],
)
def test_signatures_of_older_files_have_attributes_that_do_not_count(
    known: str, is_same: bool
) -> None:
    assert has_signature(known, SIGNATURE) == is_same


def test_a_fake_profile_takes_each_block_from_its_own_place_in_a_measured_one() -> None:
    model, x = nn.Sequential(Settled(), Settled(branch=True), Settled()), torch.randn(4, 8)
    x.requires_grad_()
    like = rekindle.profile(model, x)
    found = rekindle.profile(model, x, device="meta", like=like)
    assert [block.candidates for block in found.blocks] == [b.candidates for b in like.blocks]
    assert found.recompute_seconds == like.recompute_seconds
