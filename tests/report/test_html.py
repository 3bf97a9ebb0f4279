"""HTML of plans, profiles and frontiers, which notebooks show."""

from dataclasses import replace
from typing import Any

import pytest

from rekindle import Frontier
from tests.html_tags import Tags
from tests.planner.random_profiles import layers
from tests.planner.test_frontier import FRONTIER, POINTS

PLAN = POINTS[1].plan
VALUES = {"plan": PLAN, "profile": layers(128, 2), "frontier": FRONTIER, "none": Frontier(())}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_html_is_whole_small_and_for_both_themes(value: Any) -> None:
    html = value._repr_html_()
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert "prefers-color-scheme:dark" in html
    assert len(html) < 10_000


def test_the_html_of_a_plan_has_its_figures_and_groups_of_blocks() -> None:
    html = PLAN._repr_html_()
    assert "<td><b>predicted peak</b></td><td>3 GiB in the loss (without a plan 4 GiB)</td>" in html
    assert "<td>blocks.1-2</td><td>2 x Block</td><td>offload 1 result, keep the rest</td>" in html
    assert "<td class=n>1 MiB</td><td class=n>2 MiB</td><td class=n>0.00 ms</td>" in html


def test_each_block_of_a_plan_is_a_cell_of_its_strip() -> None:
    html = PLAN._repr_html_()
    assert html.count('<i style="background:') == 3
    assert 'title="blocks.0: keep"' in html


def test_the_legend_has_the_words_that_occur() -> None:
    keys = PLAN._repr_html_().split('class="key"')[1:]
    assert [key.split("</i>")[1].partition("<")[0] for key in keys] == ["keep", "offload"]


def test_the_html_of_a_profile_has_a_row_for_each_candidate() -> None:
    profile = layers(4, 1)
    rows = profile._repr_html_().count("<tr><td>")
    assert rows == len(profile.blocks[0].candidates)


def test_the_html_of_a_frontier_has_the_cells_of_its_text() -> None:
    html = FRONTIER._repr_html_()
    assert "<td class=n>3 GiB</td><td class=n>-25 %</td><td class=n>104.0 ms</td>" in html
    assert html.count('class="strip"') == 3


def test_names_in_html_are_escaped() -> None:
    html = replace(PLAN, model="<b>Net", peak_at="a<script>")._repr_html_()
    assert "<b>Net" not in html
    assert "<script>" not in html
