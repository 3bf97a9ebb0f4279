"""The text of a frontier: a table."""

from rekindle import Frontier
from tests.planner.test_frontier import FRONTIER


def test_a_frontier_prints_a_row_for_each_plan() -> None:
    assert str(FRONTIER).splitlines() == [
        "Frontier of Toy on H100, batch [2, 8]: 3 plans",
        "   peak  vs plain      time  vs plain  blocks",
        "  4 GiB            100.0 ms     1.00x  3 keep",
        "  3 GiB     -25 %  104.0 ms     1.04x  1 keep, 2 keep+offload",
        "  1 GiB     -75 %  150.0 ms     1.50x  3 recompute",
    ]


def test_a_frontier_of_one_plan_says_so() -> None:
    assert str(FRONTIER[:1]).splitlines()[0].endswith(": 1 plan")


def test_a_frontier_without_points_prints_too() -> None:
    assert str(Frontier(())) == "Frontier: no points"
    assert repr(Frontier(())) == "<Frontier: no points>"
