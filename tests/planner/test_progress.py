"""Progress: when it is shown, where, and in which words."""

import io
import logging
from collections.abc import Iterator

import pytest
import torch

import rekindle
from rekindle._api import planning
from rekindle.planner import progress
from rekindle.planner.progress import Progress, count_progress, report_progress, show_progress
from tests.planner.random_profiles import random_profile
from tests.toys import Stack

pytest.importorskip("scipy")


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    caplog.set_level(logging.INFO, "rekindle")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The lines that were logged."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.levelno == logging.INFO
            found.append(record.getMessage())

    handler = Handler()
    logging.getLogger("rekindle").addHandler(handler)
    yield found
    logging.getLogger("rekindle").removeHandler(handler)


def run_a_while(progress: Progress, clock: Clock, seconds: float = 1.5) -> None:
    """Two blocks of three candidates, each of which takes a while."""
    with show_progress(progress):
        report_progress("trace")
        for _ in count_progress("ab", "block"):
            for _ in count_progress([1, 2, 3], "candidate"):
                clock.now += seconds
        report_progress("verify")


EVERY_STAGE = [
    "block 1 of 2: candidate 1 of 3",
    "block 1 of 2: candidate 2 of 3",
    "block 1 of 2: candidate 3 of 3",
    "block 2 of 2",
    "block 2 of 2: candidate 1 of 3",
    "block 2 of 2: candidate 2 of 3",
    "block 2 of 2: candidate 3 of 3",
    "verify",
]


@pytest.mark.parametrize("wanted", [None, True, False])
@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_what_takes_less_than_two_seconds_is_not_shown(
    wanted: bool | None, stream: type[io.StringIO], lines: list[str]
) -> None:
    out, clock = stream(), Clock()
    run_a_while(Progress(wanted, stream=out, clock=clock), clock, seconds=0.3)
    assert (out.getvalue(), lines) == ("", [])


def test_on_a_terminal_a_bar_shows_every_stage_after_two_seconds(lines: list[str]) -> None:
    pytest.importorskip("rich")
    out, clock = Terminal(), Clock()
    run_a_while(Progress(stream=out, clock=clock), clock)
    shown = out.getvalue()
    found = [shown.find(f"rekindle: {stage} ") for stage in EVERY_STAGE]
    assert found[:2] == [-1, -1]  # by then a second and a half went by
    assert found[2] > -1
    assert found[2:] == sorted(found[2:])
    assert lines == []


def test_a_bar_is_taken_away_at_the_end() -> None:
    pytest.importorskip("rich")
    out, clock = Terminal(), Clock()
    run_a_while(Progress(stream=out, clock=clock), clock)
    clear_line, show_cursor = "\x1b[2K", "\x1b[?25h"
    assert out.getvalue().endswith(clear_line)
    assert show_cursor in out.getvalue()


def test_a_bar_is_taken_away_when_something_fails() -> None:
    pytest.importorskip("rich")
    out, clock = Terminal(), Clock()

    def fail_later(number: int) -> float:
        clock.now = 3
        report_progress("trace")
        return 1 / number

    with pytest.raises(ZeroDivisionError), show_progress(Progress(stream=out, clock=clock)):
        fail_later(0)
    assert "rekindle: trace" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")
    report_progress("nobody sees this")
    assert "nobody" not in out.getvalue()


def test_elsewhere_lines_are_logged_at_most_every_two_seconds(lines: list[str]) -> None:
    out, clock = io.StringIO(), Clock()
    run_a_while(Progress(stream=out, clock=clock), clock)
    assert lines == [
        "planning goes on: block 1 of 2: candidate 3 of 3",
        "planning goes on: block 2 of 2: candidate 2 of 3",
        "planning goes on: verify",
    ]
    assert out.getvalue() == ""


def test_without_rich_lines_are_logged(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    monkeypatch.setattr(progress, "find_spec", lambda _name: None)
    out, clock = Terminal(), Clock()
    run_a_while(Progress(True, stream=out, clock=clock), clock)
    assert (out.getvalue(), len(lines)) == ("", 3)


def test_a_bar_may_be_asked_for_where_there_is_no_terminal(lines: list[str]) -> None:
    pytest.importorskip("rich")
    out, clock = io.StringIO(), Clock()
    run_a_while(Progress(True, stream=out, clock=clock), clock)
    assert "rekindle: block 2 of 2: candidate 1 of 3" in out.getvalue()
    assert lines == []


def test_nothing_is_shown_where_nothing_is_wanted(lines: list[str]) -> None:
    out, clock = Terminal(), Clock()
    run_a_while(Progress(False, stream=out, clock=clock), clock)
    assert (out.getvalue(), lines) == ("", [])


def test_the_inner_of_two_is_shown_by_the_outer(lines: list[str]) -> None:
    clock = Clock()
    with show_progress(Progress(stream=io.StringIO(), clock=clock)):
        clock.now = 3
        with show_progress(Progress(False)):
            report_progress("inside")
        clock.now = 6
        report_progress("outside")
    assert lines == ["planning goes on: inside", "planning goes on: outside"]


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All stages that a call shows, as if it took long."""
    found: list[str] = []
    monkeypatch.setattr(Progress, "_show", lambda _self, words, _share: found.append(words))
    return found


def test_a_fit_shows_its_trace_every_candidate_and_its_verification(stages: list[str]) -> None:
    model, x = Stack(3, 16), torch.randn(64, 16)  # the first block's input needs no gradient
    rekindle.fit(model, x, "90%")
    assert stages[:3] == ["trace", "block 1 of 2", stages[2]]
    candidates = [words for words in stages if words.startswith("block 2 of 2: candidate")]
    assert candidates[0] == f"block 2 of 2: candidate 1 of {len(candidates)}"
    assert candidates[-1] == f"block 2 of 2: candidate {len(candidates)} of {len(candidates)}"
    assert len(candidates) > 2
    assert stages[-3:] == ["solve", "verify", "compare gradients"]


def test_a_frontier_shows_its_points(stages: list[str]) -> None:
    rekindle.frontier(random_profile(0), 3)
    assert stages == ["smallest peak", *(f"point {i} of 3" for i in (1, 2, 3))]


@pytest.mark.parametrize("wanted", [0, 1, "yes"])
def test_progress_is_a_bool_or_none(wanted: object) -> None:
    model, x = Stack(2, 16), torch.randn(8, 16)
    match = "progress should be a bool or None"
    with pytest.raises(TypeError, match=match):
        rekindle.profile(model, x, progress=wanted)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=match):
        rekindle.fit(model, x, "90%", progress=wanted)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=match):
        rekindle.frontier(random_profile(0), progress=wanted)  # type: ignore[arg-type]


def test_only_the_first_rank_shows_progress(
    monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(planning, "is_first_rank", lambda: False)
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    rekindle.profile(Stack(2, 16), torch.randn(8, 16))
    assert lines == []
