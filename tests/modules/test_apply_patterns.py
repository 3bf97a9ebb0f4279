"""Patterns of module paths: which modules they give a strategy."""

from typing import Any

import pytest
from torch import nn

import rekindle
from rekindle import Counts
from tests.modules.applying import BLOCKS, PER_BLOCK, managed, times, total_with
from tests.toys import Block, Mlp, Stack


def test_a_mapping_gives_strategies_to_the_modules_it_names_alone() -> None:
    assert total_with({"blocks.1": "recompute"}) == PER_BLOCK["recompute"]


def test_a_range_of_blocks_can_be_named() -> None:
    assert total_with({"blocks.[0-1]": "recompute"}) == times(PER_BLOCK["recompute"], 2)


def test_the_model_itself_is_the_empty_path() -> None:
    model = Stack(BLOCKS)
    rekindle.apply(model, {"": "recompute"})
    assert managed(model) == [""]


def test_an_empty_mapping_gives_no_strategies() -> None:
    model = Stack(BLOCKS)
    assert total_with({}, model) == Counts()
    assert managed(model) == []


def test_a_star_stands_for_one_part_of_a_path() -> None:
    model = Stack(BLOCKS)
    rekindle.apply(model, {"*.*.mlp": "recompute"})
    assert managed(model) == [f"blocks.{i}.mlp" for i in range(BLOCKS)]


def test_a_star_within_a_part_stands_for_any_letters() -> None:
    model = Stack(1)
    rekindle.apply(model, {"bl*ks.0.?lp": "recompute"})
    assert managed(model) == ["blocks.0.mlp"]


def test_two_stars_stand_for_any_number_of_parts() -> None:
    model = nn.Sequential(Block(), nn.Sequential(Block(), Mlp()))
    rekindle.apply(model, {"**.up": "recompute"})
    assert managed(model) == ["0.mlp.up", "1.0.mlp.up", "1.1.up"]


def test_two_stars_stand_for_no_part_too() -> None:
    model = Mlp()
    rekindle.apply(model, {"**.up": "recompute"})
    assert managed(model) == ["up"]


def test_two_stars_in_the_middle_stand_for_what_is_between() -> None:
    model = Stack(2)
    rekindle.apply(model, {"blocks.**.down": "recompute"})
    assert managed(model) == ["blocks.0.mlp.down", "blocks.1.mlp.down"]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("general", "specific"),
    [
        ("**", "blocks.1"),
        ("*.*", "blocks.1"),
        ("blocks.*", "blocks.1"),
        ("blocks.?", "blocks.1"),
        ("blocks.**", "blocks.1"),
        ("**.1", "blocks.1"),
        ("**", "blocks.[1]"),
        ("blocks.*", "blocks.[1]"),
        ("*.1", "b*.1"),
    ],
)
def test_the_most_specific_pattern_decides_whichever_comes_first(
    general: str, specific: str, order: int
) -> None:
    model = Stack(BLOCKS)
    given: list[tuple[str, Any]] = [(general, "keep"), (specific, "recompute")]
    rekindle.apply(model, dict(given[::order]))
    assert managed(model) == ["blocks.1"]


def test_a_block_can_be_left_out_by_a_more_specific_pattern() -> None:
    counts = total_with({"blocks.*": "recompute", "blocks.2": "keep"})
    assert counts == times(PER_BLOCK["recompute"], 2)
