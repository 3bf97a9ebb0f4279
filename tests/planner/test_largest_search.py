"""The search for the largest size within a limit: its answer, and the sizes that it tries."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.planner.largest_search import halvings, largest_within

HIGHEST = 2**20


def search(peak_of: Callable[[int], float], limit: int) -> tuple[int, list[int]]:
    tried: list[int] = []

    def tries(size: int) -> float:
        tried.append(size)
        return peak_of(size)

    return largest_within(tries, limit, HIGHEST), tried


@given(st.lists(st.integers(0, 50), min_size=1, max_size=300), st.integers(0, 5000))
def test_the_answer_fits_and_the_next_size_does_not(steps: list[int], limit: int) -> None:
    peaks = [sum(steps[: i + 1]) for i in range(len(steps))]
    tried: list[int] = []

    def peak_of(size: int) -> int:
        tried.append(size)
        return peaks[size - 1]

    found = largest_within(peak_of, limit, len(peaks))
    assert found == sum(peak <= limit for peak in peaks)
    assert len(tried) == len(set(tried))


def test_peaks_on_a_line_take_six_tries_at_a_size_of_thousands() -> None:
    assert search(lambda size: 10 + 3 * size, 12345) == (4111, [1, 2, 32, 512, 4111, 4112])


def test_peaks_that_grow_with_the_square_take_six_tries() -> None:
    found, tried = search(lambda size: 1000 + 10 * size + size**2 / 1000, 123456)
    assert (found, tried) == (7143, [1, 2, 32, 512, 7143, 7144])


def test_peaks_that_grow_in_steps_take_few_tries() -> None:
    found, tried = search(lambda size: 64 * math.ceil(size / 64), 12345)
    assert (found, len(tried)) == (12288, 16)


def test_a_size_that_runs_out_of_memory_only_narrows_the_search() -> None:
    found, tried = search(lambda size: size if size < 20 else math.inf, 1000)
    assert (found, tried[:4], len(tried)) == (19, [1, 2, 32, 17], 8)


def test_without_a_size_that_fits_the_answer_is_zero() -> None:
    assert search(lambda size: 10 * size, 9) == (0, [1])


def test_the_highest_size_is_the_answer_where_all_fit() -> None:
    assert largest_within(lambda size: 1, 10, highest=1) == 1
    assert search(lambda size: 1, 10)[0] == HIGHEST


@pytest.mark.parametrize("largest", [1, 2])
def test_small_sizes_have_no_halves_worth_a_try(largest: int) -> None:
    assert halvings(largest, [1, 2], most=3) == []
