"""The states of an activation, and the transitions between them: a table, and who keeps to it."""

import random
from contextlib import suppress
from typing import Any

import pytest

from rekindle.offload.residency import (
    AWAY,
    LEAVING,
    ON_DEVICE,
    RETURNED,
    RETURNING,
    TRANSITIONS,
    MovableBytes,
    Residency,
)


class FakeCopy:
    """A copy that notes what was done with it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def drop(self) -> None:
        self.calls.append("drop")

    def close(self) -> None:
        self.calls.append("close")


def movable() -> Any:
    """Bytes of which only the identity counts, so that no torch is needed."""
    return MovableBytes("bytes")  # type: ignore[arg-type]


PATHS = {
    ON_DEVICE: [],
    LEAVING: ["begin_copy_out"],
    AWAY: ["begin_copy_out", "end_copy_out"],
    RETURNING: ["begin_copy_out", "end_copy_out", "begin_return"],
    RETURNED: ["begin_copy_out", "end_copy_out", "begin_return", "arrive"],
}
"""One way to each state."""


def do(found: Any, transition: str) -> Any:
    """Make a transition, with whatever arguments it takes."""
    arguments: dict[str, Any] = {
        "begin_copy_out": FakeCopy(),
        "end_copy_out": found.copy_outs,
        "overwrite": "newer bytes",
        "derive": "derivation",
        "arrive": "bytes",
    }
    given = [arguments[transition]] if transition in arguments else []
    return getattr(found, transition)(*given)


def in_state(state: Residency) -> Any:
    found = movable()
    for transition in PATHS[state]:
        do(found, transition)
    assert found.residency is state
    return found


def assert_consistent(found: Any) -> None:
    """Bytes and copy are where the state says."""
    on_device = found.residency in (ON_DEVICE, LEAVING, RETURNED)
    assert (found.data is not None) == on_device
    if found.derivation is None:
        assert (found.copy is None) == (found.residency is ON_DEVICE)
    else:
        assert found.copy is None
        assert found.residency in (AWAY, RETURNED)


@pytest.mark.parametrize("state", Residency)
def test_every_state_but_the_first_is_the_end_of_a_transition_and_can_be_left(
    state: Residency,
) -> None:
    ends = {after for table in TRANSITIONS.values() for after in table.values()}
    begins = {before for table in TRANSITIONS.values() for before in table}
    assert state in ends
    assert state in begins


def test_bytes_leave_and_return_in_this_order() -> None:
    found, states = movable(), []
    for transition in [*PATHS[RETURNED], "evict"]:
        states.append(found.residency)
        do(found, transition)
    assert states == list(Residency)
    assert found.residency is AWAY


@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("state", Residency)
def test_a_transition_goes_where_the_table_says_or_changes_nothing(
    state: Residency, transition: str
) -> None:
    found = in_state(state)
    before = found.data, found.copy
    after = TRANSITIONS[transition].get(state)
    if after is None:
        with suppress(KeyError):
            assert not do(found, transition)
        assert found.residency is state
        assert (found.data, found.copy) == before
    else:
        do(found, transition)
        assert found.residency is after
    if transition != "arrive" or state is not AWAY:  # which only derived bytes do
        assert_consistent(found)


@pytest.mark.parametrize("seed", range(20))
def test_random_transitions_keep_bytes_and_copy_where_the_state_says(seed: int) -> None:
    chance, found = random.Random(seed), movable()
    for _ in range(50):
        possible = [name for name, table in TRANSITIONS.items() if found.residency in table]
        if found.derivation is not None:  # derived bytes have no copy to bring back or replace
            possible = [name for name in possible if name in ("arrive", "evict")]
        elif found.residency is AWAY:
            possible.remove("arrive")
        do(found, chance.choice(possible))
        assert_consistent(found)


def test_a_copy_out_that_was_replaced_by_another_ends_nothing() -> None:
    found = movable()
    first = found.begin_copy_out(FakeCopy())
    found.overwrite("newer bytes")
    second = found.begin_copy_out(FakeCopy())
    found.end_copy_out(first)
    assert found.residency is LEAVING
    found.end_copy_out(second)
    assert found.residency is AWAY


@pytest.mark.parametrize(
    ("state", "transition", "calls"),
    [
        (LEAVING, "keep_on_device", ["close"]),
        (LEAVING, "overwrite", ["close"]),
        (RETURNED, "overwrite", ["close"]),
        (RETURNING, "evict", ["drop"]),
        (RETURNED, "evict", ["drop"]),
        (RETURNING, "arrive", []),
    ],
)
def test_a_copy_is_closed_when_it_is_given_up_and_dropped_when_it_stays(
    state: Residency, transition: str, calls: list[str]
) -> None:
    found = in_state(state)
    copy = found.copy
    do(found, transition)
    assert copy.calls == calls


@pytest.mark.parametrize("state", Residency)
def test_keep_on_device_says_whether_the_bytes_are_still_there(state: Residency) -> None:
    assert in_state(state).keep_on_device() == (state in (ON_DEVICE, LEAVING))


def test_derived_bytes_are_away_without_a_copy_and_arrive_without_a_return() -> None:
    found = movable()
    found.derive("derivation")
    assert (found.residency, found.data, found.copy) == (AWAY, None, None)
    found.arrive("bytes")
    assert found.residency is RETURNED
    found.evict()
    assert (found.residency, found.data) == (AWAY, None)
