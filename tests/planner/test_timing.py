"""A step is timed as often as it takes to know its time, and no more often."""

from collections.abc import Callable, Iterator

import pytest
import torch

from rekindle.planner.instruments import timing

Times = Callable[[list[float]], list[float]]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    """The times that are taken of a step whose runs take so many seconds."""

    def taken(runs: list[float]) -> list[float]:
        def points() -> Iterator[float]:
            for seconds in runs:
                yield 0.0
                yield seconds

        clock = points()
        monkeypatch.setattr(timing, "now", lambda _device: next(clock))
        return timing.times_of(lambda: None, torch.device("cpu"))

    return taken


def test_two_runs_that_take_the_same_are_enough(times: Times) -> None:
    assert times([0.5, 0.505, 9.0]) == [0.5, 0.505]


def test_a_third_run_follows_where_the_first_two_differ(times: Times) -> None:
    assert times([0.3, 0.4, 0.3]) == [0.3, 0.4, 0.3]


def test_no_more_than_three_runs_are_timed(times: Times) -> None:
    assert times([0.3, 0.2, 0.1, 0.1]) == [0.3, 0.2, 0.1]


def test_a_long_step_runs_once(times: Times) -> None:
    assert times([1.5, 1.0]) == [1.5]


def test_steps_are_timed_for_about_a_second(times: Times) -> None:
    assert times([0.6, 0.7, 0.6]) == [0.6, 0.7]
