"""The plot of a frontier."""

import sys
from dataclasses import replace
from typing import Any

import pytest

from rekindle import Frontier
from tests.planner.random_profiles import MIB
from tests.planner.test_frontier import FRONTIER, KEEP, point

figure = pytest.importorskip("matplotlib.figure")


def lines(axes: Any) -> list[tuple[str, list[float], list[float]]]:
    return [(e.get_label(), list(e.get_xdata()), list(e.get_ydata())) for e in axes.get_lines()]


def test_a_plot_has_each_plan_and_the_step_without_one() -> None:
    axes = FRONTIER.plot()
    (name, peaks, times), (plain, *ends) = lines(axes)
    assert (name, peaks, times) == ("plans", [4, 3, 1], pytest.approx([100, 104, 150]))
    assert (plain, *ends) == ("without a plan", [4], [100])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("peak (GiB)", "time of a step (ms)")
    assert axes.get_title() == "Toy on H100"


def test_the_unit_is_that_of_the_largest_peak() -> None:
    small = point(2 * MIB, 0.1, KEEP)
    small = replace(small, plan=replace(small.plan, plain_peak=3 * MIB))
    assert Frontier((small,)).plot().get_xlabel() == "peak (MiB)"


def test_a_plot_goes_on_the_axes_that_are_given() -> None:
    axes = figure.Figure().add_subplot()
    assert FRONTIER.plot(axes) is axes
    assert len(axes.get_lines()) == 2


def test_a_frontier_without_points_has_an_empty_plot() -> None:
    assert lines(Frontier(()).plot()) == []


def test_where_pyplot_is_not_imported_the_figure_belongs_to_its_axes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    assert FRONTIER.plot().figure.canvas.manager is None
    assert "matplotlib.pyplot" not in sys.modules


def test_where_pyplot_is_imported_it_shows_the_figure() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axes = FRONTIER.plot()
    assert pyplot.gcf() is axes.figure
    pyplot.close(axes.figure)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.report.plot.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'rekindle\[plot\]'"):
        FRONTIER.plot()
