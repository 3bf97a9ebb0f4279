"""A frontier as a value: a sequence of points, a file, columns for logs."""

import json
from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle import Frontier, Plan, Point
from rekindle.planner.types import Candidate
from rekindle.strategy import Keep, NumberedOps, Recompute, SavedIndices, Selective
from tests.planner.random_profiles import GIB, MIB, random_profile

KEEP = Candidate(Keep(), 3 * MIB)
RECOMPUTE = Candidate(Recompute(), MIB)
MOVE = Candidate(SavedIndices(offloaded=(1,)), MIB, bytes_moved=2 * MIB)


def point(peak: int, seconds: float, *candidates: Candidate, **fields: Any) -> Point:
    blocks = tuple((f"blocks.{i}", "Block", each) for i, each in enumerate(candidates))
    plan = Plan(
        "Toy",
        "[2, 8]",
        "H100",
        peak,
        peak,
        seconds,
        4 * GIB,
        0.1,
        0.0,
        "the loss",
        blocks,
        **fields,
    )
    return Point(peak, seconds, plan)


POINTS = [
    point(4 * GIB, 0.1, KEEP, KEEP, KEEP),
    point(3 * GIB, 0.104, KEEP, MOVE, MOVE),
    point(GIB, 0.15, RECOMPUTE, RECOMPUTE, RECOMPUTE),
]
FRONTIER = Frontier(tuple(POINTS))


def test_a_frontier_is_a_sequence_of_its_points() -> None:
    assert list(FRONTIER) == POINTS
    assert (len(FRONTIER), FRONTIER[0], FRONTIER[-1]) == (3, POINTS[0], POINTS[2])
    assert (POINTS[1] in FRONTIER, FRONTIER.index(POINTS[1])) == (True, 1)
    assert list(reversed(FRONTIER)) == POINTS[::-1]


def test_a_frontier_is_equal_to_a_list_of_its_points() -> None:
    assert FRONTIER == POINTS
    assert POINTS == FRONTIER
    assert POINTS[:2] != FRONTIER
    assert FRONTIER != "points"
    assert hash(FRONTIER) == hash(Frontier(tuple(POINTS)))


def test_a_slice_of_a_frontier_is_one_of_fewer_points() -> None:
    assert FRONTIER[1:] == Frontier(tuple(POINTS[1:]))
    assert isinstance(FRONTIER[1:], Frontier)


def test_a_frontier_that_is_read_again_is_the_same(tmp_path: Path) -> None:
    FRONTIER.save(tmp_path / "frontier.json")
    assert Frontier.load(tmp_path / "frontier.json") == FRONTIER
    assert json.loads((tmp_path / "frontier.json").read_text()) == FRONTIER.as_json()


def test_a_frontier_whose_peaks_rise_is_refused(tmp_path: Path) -> None:
    Frontier(tuple(POINTS[::-1])).save(tmp_path / "frontier.json")
    with pytest.raises(ValueError, match=r"points\[1\].peak: should be below"):
        Frontier.load(tmp_path / "frontier.json")


def test_the_file_of_a_plan_is_no_frontier(tmp_path: Path) -> None:
    POINTS[0].plan.save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="is not a frontier of rekindle's"):
        Frontier.load(tmp_path / "plan.json")


def test_columns_of_a_frontier_have_a_value_for_each_point() -> None:
    columns = FRONTIER.as_dict()
    assert columns["peak"] == [4 * GIB, 3 * GIB, GIB]
    assert columns["slowdown"] == pytest.approx([1, 1.04, 1.5])
    assert columns["blocks_recompute"] == [0, 0, 3]
    assert columns["blocks_offload"] == [0, 2, 0]


def test_a_figure_that_one_point_has_is_none_at_the_others() -> None:
    measured = point(GIB, 0.2, KEEP, measured_peak=5, measured_time=0.3)
    assert Frontier((POINTS[0], measured)).as_dict()["measured_peak"] == [None, 5]


def test_the_figures_of_a_plan_are_numbers_and_words_without_none() -> None:
    figures = POINTS[1].plan.as_dict()
    assert {type(value) for value in figures.values()} <= {int, float, str, bool}
    assert figures["predicted_peak"] == 3 * GIB
    assert figures["bytes_moved"] == 4 * MIB
    assert "measured_peak" not in figures


def test_a_block_counts_for_each_thing_that_it_does() -> None:
    figures = POINTS[1].plan.as_dict()
    counts = {name: count for name, count in figures.items() if name.startswith("blocks")}
    assert counts == {
        "blocks": 3,
        "blocks_keep": 3,
        "blocks_recompute": 0,
        "blocks_offload": 2,
        "blocks_spill": 0,
    }


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (Keep(), ("keep",)),
        (Recompute(), ("recompute",)),
        (Selective(NumberedOps(kept=(1,))), ("keep", "recompute")),
        (Selective(NumberedOps(offloaded=(1,), tier="disk")), ("recompute", "spill")),
        (SavedIndices(recomputed=(2,)), ("keep", "recompute")),
        (SavedIndices(modules=("act",)), ("keep", "recompute")),
        (SavedIndices(offloaded=(2,)), ("keep", "offload")),
    ],
    ids=str,
)
def test_a_candidate_has_a_word_for_each_thing_that_is_done(
    strategy: Any, words: tuple[str, ...]
) -> None:
    assert Candidate(strategy).words == words


def test_what_frontier_returns_is_a_frontier() -> None:
    pytest.importorskip("scipy")
    found = rekindle.frontier(random_profile(2), 3)
    assert isinstance(found, Frontier)
    assert len(repr(found)) < 120
