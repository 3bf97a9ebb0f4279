"""Traces and profiles of several ranks merged into one, and the error of one rank on all."""

import pickle
from dataclasses import replace

import pytest
import torch

from rekindle.errors import RekindleError
from rekindle.planner.ranks.failures import failure_of
from rekindle.planner.ranks.worst_case import merge_traces, shape_of_profile, worst_case
from rekindle.planner.timeline import simulate
from rekindle.planner.types import BlockKey, BlockProfile, Candidate, Profile, StepTrace
from rekindle.strategy import Keep, NumberedOps, Recompute, Selective

KEEP = Candidate(Keep(), bytes_held=100, forward_seconds=1.0, backward_seconds=2.0)
DROP = Candidate(Recompute(), bytes_held=1, forward_seconds=1.0, backward_seconds=3.0)
PATHS = ("a", "b", "c", "d")


def trace(order: str, keys: str | None = None, between: int = 0, passed: int = 9) -> StepTrace:
    """The trace of a rank that ran these blocks, with these keys."""
    paths, count = tuple(order), len(order)
    return StepTrace(
        paths,
        {path: BlockKey(key, "") for path, key in zip(paths, keys or "k" * count, strict=True)},
        between=(between,) * count,
        passed=(passed,) * count,
        cast_epochs=tuple(range(count)),
        seconds=float(count),
    )


def profile(option: Candidate, **options: int) -> Profile:
    block = BlockProfile("Block", "Block", (option, DROP), output_freed=options.pop("let_go", 0))
    return Profile(
        "Stack", "none", "", 0, 0, 0, 0.5, 0.0, (block,), (("a", 0), ("b", 0)), **options
    )


@pytest.mark.parametrize(
    ("orders", "merged"),
    [
        (["abcd", "abcd"], "abcd"),
        (["acd", "abd"], "abcd"),
        (["ab", "cd"], "abcd"),
        (["bd", "ad", "ac"], "abcd"),
        (["abab", "abb"], "abab"),
    ],
)
def test_a_merged_forward_has_that_of_each_rank_in_it(orders: list[str], merged: str) -> None:
    found = merge_traces([trace(order) for order in orders], PATHS).order
    assert "".join(found) == merged


def test_blocks_that_are_alike_on_every_rank_that_ran_both_are_one_kind() -> None:
    merged = merge_traces([trace("acd", "xxy"), trace("abd", "ppq")], PATHS)
    assert merged.indices == {"a": 0, "b": 0, "c": 0, "d": 1}


def test_blocks_that_no_rank_ran_both_of_are_kinds_of_their_own() -> None:
    assert merge_traces([trace("a"), trace("b")], PATHS).indices == {"a": 0, "b": 1}


def test_blocks_that_differ_on_one_rank_are_kinds_of_their_own() -> None:
    assert merge_traces([trace("ab", "xx"), trace("ab", "xy")], PATHS).indices == {"a": 0, "b": 1}


def test_each_place_has_the_most_of_the_ranks_that_ran_its_block() -> None:
    merged = merge_traces(
        [trace("ac", between=5, passed=2), trace("abc", between=3, passed=7)], PATHS
    )
    assert merged.between == (5, 3, 5)
    assert merged.passed == (2, 7, 2)
    assert merged.cast_epochs == (0, 1, 2)
    assert merged.seconds == 3.0


def test_a_plan_takes_as_much_as_on_the_rank_where_it_takes_the_most() -> None:
    one = profile(replace(KEEP, bytes_held=50, backward_peak=80, input_freed=4), let_go=3)
    two = profile(replace(KEEP, bytes_held=70, backward_peak=10, input_freed=1), let_go=5)
    found = worst_case([one, two], one)
    assert found.blocks[0].candidates[0] == replace(
        KEEP, bytes_held=70, backward_peak=80, input_freed=1
    )
    assert found.blocks[0].output_freed == 3
    keeps = [each.blocks[0].candidates[:1] * 2 for each in (one, two, found)]
    peaks = [simulate(p, o).peak for p, o in zip((one, two, found), keeps, strict=True)]
    assert peaks[2] >= max(peaks[:2])


def test_a_rank_has_the_ops_of_its_own_graph_with_what_the_worst_measured() -> None:
    one = profile(Candidate(Selective(NumberedOps((1,))), bytes_held=10, forward_seconds=2.0))
    two = profile(Candidate(Selective(NumberedOps((4,))), bytes_held=30, forward_seconds=1.0))
    found = [worst_case([one, two], own).blocks[0].candidates[0] for own in (one, two)]
    assert [option.strategy.policy.kept for option in found] == [(1,), (4,)]
    assert [option.bytes_held for option in found] == [30, 30]
    assert [option.forward_seconds for option in found] == [2.0, 2.0]
    assert shape_of_profile(one) == shape_of_profile(two)


def test_the_profile_of_one_rank_is_its_own() -> None:
    one = profile(KEEP)
    assert worst_case([one], one) is one


class OddError(Exception):
    """Is made of two numbers, and remembers one."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.one = one
        self.lock = torch.Generator


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        RekindleError("no"),
        torch.OutOfMemoryError("no room"),
        KeyError("name"),
        OddError(1, 2),
        OSError(2, "no such file"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_error_of_a_rank_has_its_class_and_text_on_others(error: Exception) -> None:
    failure = pickle.loads(pickle.dumps(failure_of(error, 3)))
    raised = failure.error()
    assert type(raised) is type(error)
    assert str(raised) == str(error)
    assert "On rank 3: " in f"{raised}{raised.__notes__}"
    assert "The traceback on rank 3" in raised.__notes__[-1]


def test_what_an_error_knows_it_knows_on_other_ranks() -> None:
    assert failure_of(OddError(1, 2), 0).error().one == 1  # type: ignore[attr-defined]


def test_an_error_that_cannot_be_sent_is_described() -> None:
    class LocalError(Exception):
        pass

    raised = failure_of(LocalError("no"), 1).error()
    assert type(raised) is RekindleError
    assert str(raised) == "On rank 1: no (LocalError)"


def test_an_interrupt_of_one_rank_is_an_error_on_others() -> None:
    raised = failure_of(KeyboardInterrupt(), 1).error()
    assert type(raised) is RekindleError
    assert "(KeyboardInterrupt)" in str(raised)
