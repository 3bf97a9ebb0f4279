"""Fixtures of the planner's tests."""

import logging
from collections.abc import Callable

import pytest

from rekindle.planner.types import BlockTrace


def every_third(trace: BlockTrace) -> list[frozenset[int]]:
    """Sets of ops to keep that depend on no time, of results that backward needs."""
    needed = [op.number for op in trace.ops if trace.saved.issuperset(op.outputs)]
    return [frozenset(needed[start::3]) for start in range(3)]


@pytest.fixture
def same_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have the same candidates, whatever the times are."""
    monkeypatch.setattr("rekindle.planner.keep_sets.keep_sets", every_third)
    monkeypatch.setattr("rekindle.planner.profile_model.undominated", list)


@pytest.fixture
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have few candidates, where a test is not about them: each one is run, fake or not."""
    monkeypatch.setattr(
        "rekindle.planner.keep_sets.keep_sets", lambda trace: every_third(trace)[:1]
    )


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns the lines that rekindle has logged so far."""
    caplog.set_level(logging.WARNING, "rekindle")
    return lambda: [record.getMessage() for record in caplog.records]
