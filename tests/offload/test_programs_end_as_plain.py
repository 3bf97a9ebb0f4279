"""Random programs end under offload as they do plain."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

from rekindle.offload.owners import forget_unowned
from tests.offloading import spilling
from tests.programs import MODES, Mode, Program, differences, format_program, programs
from tests.programs import run as run_program

pytestmark = pytest.mark.usefixtures("new_offloaders", "written_at_once")


def offloaded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with spilling():
        return function(*args, **kwargs)


def outcome(program: Program, **options: Any) -> dict[str, Any] | None:
    """What a program leaves behind, or None if autograd refuses it."""
    try:
        return run_program(program, **options)
    except (RuntimeError, NotImplementedError):
        return None


def assert_ends_as_plain(
    program: Program, run: Callable[[], dict[str, Any] | None], modes: Mapping[str, Mode] = MODES
) -> None:
    expected = outcome(program, plain=True, modes=modes)
    for _ in range(3):
        found = run()
        note(f"{format_program(program)}\nplain {expected is None=}, offloaded {found is None=}")
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            assert differences(expected, found) == []


FEW = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@FEW
@given(programs({"offloaded": Mode(offloaded)}))
def test_random_programs_with_offloaded_regions_end_as_plain(program: Program) -> None:
    forget_unowned()
    modes = {"offloaded": Mode(offloaded)}
    assert_ends_as_plain(program, lambda: outcome(program, plain=False, modes=modes), modes)


@FEW
@given(programs())
def test_random_programs_that_are_offloaded_whole_end_as_plain(program: Program) -> None:
    forget_unowned()
    assert_ends_as_plain(program, lambda: offloaded(outcome, program, plain=True))


@FEW
@given(programs())
def test_random_programs_of_checkpointed_regions_that_are_offloaded_whole_end_as_plain(
    program: Program,
) -> None:
    """Regions may run what plain autograd refuses, with offload or without."""
    forget_unowned()
    if outcome(program, plain=True) is not None:
        assert_ends_as_plain(program, lambda: offloaded(outcome, program, plain=False))
