"""Room is handed out once, taken back whole, and in the same places every time."""

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from rekindle.offload.tiers import arena as arenas
from rekindle.offload.tiers.arena import ALIGNMENT, Lease, aligned

PAGE = ALIGNMENT
sizes = st.integers(1, 5 * PAGE)
actions = st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 50)), max_size=60)
"""Take so much, or give back one of those that are taken; in any case by these numbers."""
Actions = list[tuple[bool, int, int]]


class Model:
    """What an arena should be: every page has at most one owner, and the lowest place is taken."""

    def __init__(self, size: int) -> None:
        self.pages: list[int | None] = [None] * (size // PAGE)

    def lease(self, nbytes: int, owner: int) -> int | None:
        count = -(-nbytes // PAGE)
        for start in range(len(self.pages) - count + 1):
            if all(page is None for page in self.pages[start : start + count]):
                self.pages[start : start + count] = [owner] * count
                return start * PAGE
        return None

    def give_back(self, owner: int) -> None:
        self.pages = [None if page == owner else page for page in self.pages]

    def free_at_the_end(self) -> int:
        count = 0
        while count < len(self.pages) and self.pages[-1 - count] is None:
            count += 1
        return count * PAGE


class Arena(arenas.Arena):
    """An arena whose leases are held here, and end when they are given back."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.leases: dict[int, Lease] = {}

    def lease(self, nbytes: int) -> int | None:  # type: ignore[override]
        lease = super().lease(nbytes)
        if lease is None:
            return None
        assert lease.nbytes == nbytes
        self.leases[lease.start] = lease
        return lease.start

    def give_back(self, start: int, nbytes: int) -> None:
        assert self.leases.pop(start).nbytes == nbytes
        self._take_back()


def free_bytes(arena: Arena) -> int:
    return sum(length for _, length in arena._free)


def test_aligned_rounds_up_to_whole_pages() -> None:
    asked = [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE]
    assert [aligned(n) for n in asked] == [0, PAGE, PAGE, PAGE, 2 * PAGE, 3 * PAGE]


@given(st.integers(0, 30), actions)
def test_every_place_is_the_lowest_that_is_free(pages: int, actions: Actions) -> None:
    arena, model = Arena(pages * PAGE), Model(pages * PAGE)
    taken: list[tuple[int, int, int]] = []
    for owner, (takes, nbytes, pick) in enumerate(actions):
        if takes or not taken:
            start = arena.lease(nbytes)
            assert start == model.lease(nbytes, owner)
            if start is not None:
                taken.append((owner, start, nbytes))
        else:
            gone, *place = taken.pop(pick % len(taken))
            arena.give_back(*place)
            model.give_back(gone)


@given(st.integers(0, 30), actions)
def test_no_two_owners_share_a_byte(pages: int, actions: Actions) -> None:
    arena = Arena(pages * PAGE)
    taken: list[tuple[int, int]] = []
    for takes, nbytes, pick in actions:
        if takes or not taken:
            start = arena.lease(nbytes)
            if start is not None:
                taken.append((start, nbytes))
        else:
            arena.give_back(*taken.pop(pick % len(taken)))
        for (start, length), (after, _) in pairwise(sorted(taken)):
            assert start + length <= after
        assert all(start + nbytes <= arena.size for start, nbytes in taken)


@given(st.integers(0, 30), actions)
def test_what_is_taken_and_what_is_free_add_up_to_the_size(pages: int, actions: Actions) -> None:
    arena = Arena(pages * PAGE)
    taken: list[tuple[int, int]] = []
    for takes, nbytes, pick in actions:
        if takes or not taken:
            start = arena.lease(nbytes)
            if start is None:
                arena.grow(nbytes)
            else:
                taken.append((start, nbytes))
        else:
            arena.give_back(*taken.pop(pick % len(taken)))
        assert free_bytes(arena) + sum(aligned(n) for _, n in taken) == arena.size


@given(st.integers(0, 30), actions)
def test_no_two_free_stretches_touch(pages: int, actions: Actions) -> None:
    arena = Arena(pages * PAGE)
    taken: list[tuple[int, int]] = []
    for takes, nbytes, pick in actions:
        if takes or not taken:
            start = arena.lease(nbytes)
            if start is not None:
                taken.append((start, nbytes))
        else:
            arena.give_back(*taken.pop(pick % len(taken)))
        assert list(arena._free) == sorted(arena._free)
        for (start, length), (after, _) in pairwise(arena._free):
            assert start + length < after


@given(st.lists(sizes, max_size=20), st.randoms(use_true_random=False))
def test_an_arena_is_unused_once_all_is_given_back_in_any_order(
    requests: list[int], random: Random
) -> None:
    arena = Arena(100 * PAGE)
    taken = [(arena.lease(n), n) for n in requests]
    assert arena.is_unused == (not requests)
    random.shuffle(taken)
    for start, nbytes in taken:
        assert start is not None
        arena.give_back(start, nbytes)
    assert arena.is_unused
    assert arena.lease(100 * PAGE) == 0


def replay(arena: Arena, actions: Actions, grows: bool) -> list[int | None]:
    """The places that the same requests get, in the same order; at the end all is given back."""
    taken: list[tuple[int, int]] = []
    places = []
    for takes, nbytes, pick in actions:
        if takes or not taken:
            start = arena.lease(nbytes)
            if start is None and grows:
                arena.grow(arena.missing(nbytes))
                start = arena.lease(nbytes)
            places.append(start)
            if start is not None:
                taken.append((start, nbytes))
        else:
            arena.give_back(*taken.pop(pick % len(taken)))
    for start, nbytes in taken:
        arena.give_back(start, nbytes)
    return places


@given(st.integers(0, 30), actions)
def test_the_same_requests_get_the_same_places_after_all_was_given_back(
    pages: int, actions: Actions
) -> None:
    arena = Arena(pages * PAGE)
    assert replay(arena, actions, grows=False) == replay(arena, actions, grows=False)


@given(actions)
def test_a_step_that_grew_the_arena_fits_the_next_time_in_the_same_places(
    actions: Actions,
) -> None:
    arena = Arena(0)
    first = replay(arena, actions, grows=True)
    size = arena.size
    assert replay(arena, actions, grows=False) == first
    assert arena.size == size


@given(st.integers(0, 30), actions, sizes)
def test_growing_by_what_is_missing_makes_room_and_a_page_less_does_not(
    pages: int, actions: Actions, nbytes: int
) -> None:
    arena, model = Arena(pages * PAGE), Model(pages * PAGE)
    taken: list[tuple[int, int, int]] = []
    for owner, (takes, size, pick) in enumerate(actions):
        if takes or not taken:
            start = arena.lease(size)
            model.lease(size, owner)
            if start is not None:
                taken.append((owner, start, size))
        else:
            gone, *place = taken.pop(pick % len(taken))
            arena.give_back(*place)
            model.give_back(gone)
    while model.lease(nbytes, -1) is not None:
        assert arena.lease(nbytes) is not None
    assert arena.lease(nbytes) is None
    missing = arena.missing(nbytes)
    assert missing == aligned(nbytes) - model.free_at_the_end()
    assert missing >= PAGE
    end = arena.size - model.free_at_the_end()
    if missing > PAGE:
        arena.grow(missing - PAGE)
        assert arena.lease(nbytes) is None
        missing = PAGE
    arena.grow(missing)
    assert arena.lease(nbytes) == end


def test_growing_adds_whole_pages_at_the_end() -> None:
    arena = Arena(PAGE)
    arena.lease(1)
    arena.grow(PAGE + 1)
    assert arena.size == 3 * PAGE
    assert arena.lease(2 * PAGE) == PAGE


def test_an_arena_of_no_bytes_is_unused_and_has_no_room() -> None:
    arena = Arena(0)
    assert arena.is_unused
    assert arena.lease(1) is None
    assert arena.missing(1) == PAGE


def test_a_hole_in_the_middle_is_joined_with_both_neighbours() -> None:
    arena = Arena(3 * PAGE)
    first, middle, last = arena.lease(PAGE), arena.lease(PAGE), arena.lease(PAGE)
    assert (first, middle, last) == (0, PAGE, 2 * PAGE)
    arena.give_back(0, PAGE)
    arena.give_back(2 * PAGE, PAGE)
    assert arena.lease(2 * PAGE) is None
    arena.give_back(PAGE, PAGE)
    assert arena.lease(3 * PAGE) == 0


def test_room_comes_back_when_whoever_took_it_forgets_it() -> None:
    arena = arenas.Arena(PAGE)
    arena.lease(PAGE)
    lease = arena.lease(PAGE)
    assert lease is not None
    assert arena.lease(PAGE) is None
    assert not arena.is_unused
    del lease
    assert arena.is_unused
