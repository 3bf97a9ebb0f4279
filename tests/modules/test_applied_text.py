"""What `apply` returns, printed: a tree of the modules that have strategies."""

from typing import Any

from torch import nn

import rekindle
from rekindle import policies
from rekindle.planner.types import Candidate
from rekindle.strategy import Keep, SavedIndices, Tile
from tests.modules.applying import BLOCKS
from tests.toys import Mlp, Stack


def shown(what: Any, model: nn.Module | None = None) -> list[str]:
    return str(rekindle.apply(model or Stack(BLOCKS), what)).splitlines()


def test_blocks_that_are_alike_are_one_line() -> None:
    assert shown("recompute") == ["Stack", "  blocks.0-2: 3 x Block: recompute"]


def test_a_strategy_inside_another_is_indented_below_it() -> None:
    assert shown({"blocks.*": "recompute", "blocks.*.mlp": "keep"}) == [
        "Stack",
        "  blocks.0-2: 3 x Block: recompute",
        "    blocks.0-2.mlp: 3 x Mlp: keep",
    ]


def test_a_gap_in_the_numbers_is_shown() -> None:
    what = {"blocks.[0134]": "recompute", "blocks.2": "offload"}
    assert shown(what, Stack(5)) == [
        "Stack",
        "  blocks.0-1,3-4: 4 x Block: recompute",
        "  blocks.2: Block: offload",
    ]


def test_the_model_itself_is_called_so() -> None:
    assert shown({"": "recompute"}) == ["Stack", "  (itself): Stack: recompute"]


def test_a_policy_is_shown_as_its_code() -> None:
    assert shown({"blocks.0": policies.keep("aten::mm")})[1:] == [
        "  blocks.0: Block: keep('aten::mm')"
    ]


def test_what_is_applied_to_nothing_is_the_models_name() -> None:
    assert shown({}) == ["Stack"]


def test_its_repr_is_what_it_prints() -> None:
    applied = rekindle.apply(Stack(BLOCKS), "recompute")
    assert repr(applied) == str(applied)


def test_what_a_plan_applies_is_in_the_words_of_the_plan() -> None:
    part = Candidate(SavedIndices(recomputed=(0,)), recomputed_names=("relu",))
    chosen = [Candidate(Keep()), part, part]
    blocks = tuple((f"blocks.{i}", "Block", each) for i, each in enumerate(chosen))
    plan = rekindle.Plan("Stack", "[2, 8]", "cpu", 9, 8, 0.1, 9, 0.1, 0.0, "the loss", blocks)
    assert shown(plan) == [
        "Stack",
        "  blocks.0: Block: keep",
        "  blocks.1-2: 2 x Block: recompute 1 result (relu), keep the rest",
    ]
    lines = [line.rpartition(":")[0].replace("1 x ", "") for line in str(plan).splitlines()]
    assert lines[-2:] == shown(plan)[1:]


def test_a_tiled_region_is_shown_with_its_chunks() -> None:
    assert str(Tile(4)) == "tile in 4 chunks, recompute"


def test_what_was_applied_can_be_compared() -> None:
    one, other = (rekindle.apply(Stack(BLOCKS), "recompute") for _ in range(2))
    assert one == other
    assert one != rekindle.apply(Stack(BLOCKS), "offload")
    assert hash(one) == hash(other)


def test_a_line_names_no_module_without_a_strategy() -> None:
    """Two of the four parts: `0-1.0-1` would be all of them."""
    model = nn.Sequential(nn.Sequential(Mlp(), Mlp()), nn.Sequential(Mlp(), Mlp()))
    lines = shown({"0.1": "recompute", "1.0": "recompute"}, model)
    assert not any("0-1.0-1" in line for line in lines)


def test_a_part_is_shown_below_the_module_that_it_is_in() -> None:
    lines = shown({"blocks.0": "recompute", "blocks.1": "keep", "blocks.*.mlp": "offload"})
    assert lines == [
        "Stack",
        "  blocks.0: Block: recompute",
        "    blocks.0.mlp: Mlp: offload",
        "  blocks.1: Block: keep",
        "    blocks.1.mlp: Mlp: offload",
        "  blocks.2.mlp: Mlp: offload",
    ]
