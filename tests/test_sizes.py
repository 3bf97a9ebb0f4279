"""Sizes in bytes are read as people write them, and written as people read them."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rekindle.sizes import format_budget, format_bytes, parse_bytes, rounded_up

UNITS = {
    "B": 1,
    "KB": 10**3,
    "KiB": 2**10,
    "MB": 10**6,
    "MiB": 2**20,
    "GB": 10**9,
    "GiB": 2**30,
    "TB": 10**12,
    "TiB": 2**40,
}
units = st.sampled_from(sorted(UNITS))


@given(st.integers(0, 10**6), units)
def test_a_whole_number_and_a_unit_are_multiplied(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}", "budget") == number * UNITS[unit]


@given(st.integers(0, 10**6), units, st.sampled_from(["", " ", "  ", "\t"]))
def test_case_and_blanks_do_not_matter(number: int, unit: str, blank: str) -> None:
    expected = number * UNITS[unit]
    for written in (unit, unit.lower(), unit.upper()):
        assert parse_bytes(f"{blank}{number}{blank}{written}{blank}", "budget") == expected


@given(st.integers(0, 2**80))
def test_an_int_is_itself(number: int) -> None:
    assert parse_bytes(number, "budget") == number


@given(st.integers(0, 2**80))
@example(2**53 + 1)
def test_text_without_a_unit_is_bytes_to_the_last_one(number: int) -> None:
    assert parse_bytes(str(number), "budget") == number


@given(st.integers(0, 10**6))
@example(1001)
def test_a_decimal_fraction_of_a_unit_is_exact(thousandths: int) -> None:
    written = f"{thousandths // 1000}.{thousandths % 1000:03}"
    assert parse_bytes(f"{written}KB", "budget") == thousandths


def test_a_binary_fraction_of_a_unit_is_exact() -> None:
    assert parse_bytes("1.5GiB", "budget") == 3 * 2**29


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "-1GiB",
        "1e9",
        "24G",
        "1 2 MB",
        "1,5GB",
        ".5GB",
        "5.GB",
        "0x10",
        "inf",
        "nan",
    ],
)
def test_text_that_is_no_size_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(
        ValueError, match=r'^budget should be like "24GiB" or "800MB", but got'
    ) as e:
        parse_bytes(text, "budget")
    assert repr(text) in str(e.value)


def test_a_share_as_text_is_an_error_and_not_zero_bytes() -> None:
    with pytest.raises(ValueError, match="budget"):
        parse_bytes("0.5", "budget")


def test_a_number_too_large_for_a_float_is_still_a_number() -> None:
    assert parse_bytes("9" * 400, "budget") == int("9" * 400)


@pytest.mark.parametrize("value", [1.0, None, True, False, b"1GiB"])
def test_what_is_neither_int_nor_text_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match=f"^budget .* got {type(value).__name__}"):
        parse_bytes(value, "budget")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "meant"),
    [("24G", "24GiB"), ("24 g", "24GiB"), ("800M", "800MiB"), ("0.5", "0.5GiB"), (1.5, "1.5GiB")],
)
def test_an_error_says_which_size_may_be_meant(value: Any, meant: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f': "{meant}", perhaps?'):
        parse_bytes(value, "max_offload")


def test_nothing_is_meant_by_what_is_no_size() -> None:
    with pytest.raises(ValueError, match=r"but got 'half'$"):
        parse_bytes("half", "max_offload")


def test_a_negative_number_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^budget should not be negative, but got -1$"):
        parse_bytes(-1, "budget")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1 MiB"),
        (10 * 2**30, "10 GiB"),
        (3 * 2**40, "3 TiB"),
        (5000 * 2**40, "5000 TiB"),
        (-(2**20), "-1 MiB"),
    ],
)
def test_a_size_is_written_in_the_largest_unit_that_fits(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 1023), st.integers(0, 4))
def test_whole_units_survive_being_written_and_read(number: int, power: int) -> None:
    count = number * 1024**power
    assert parse_bytes(format_bytes(count), "budget") == count


@given(st.integers(0, 2**50))
def test_what_is_written_is_within_a_twentieth_of_its_unit(count: int) -> None:
    text = format_bytes(count)
    read = parse_bytes(text, "budget")
    assert abs(read - count) <= UNITS[text.split()[1]] * 0.05 + 1


@given(st.integers(0, 2**50))
@example(2**20 - 1)
def test_no_more_than_1023_of_a_unit_is_written(count: int) -> None:
    number, unit = format_bytes(count).split()
    assert unit == "TiB" or float(number) < 1024


@given(st.integers(0, 2**50))
@example(2**20 - 1)
def test_what_is_written_in_code_is_no_less_and_at_most_a_tenth_of_a_unit_more(count: int) -> None:
    text = format_budget(count)
    assert parse_bytes(text, "budget") == rounded_up(count)
    assert 0 <= rounded_up(count) - count <= UNITS[text.lstrip("0123456789.")] / 10


def test_numbers_of_one_message_are_in_the_unit_of_the_largest() -> None:
    whole = 5 * 2**30
    parts = [whole, 700 * 2**20, 110 * 2**20, 50 * 2**20]
    written = [format_bytes(part, of=whole) for part in parts]
    assert written == ["5 GiB", "0.7 GiB", "0.1 GiB", "50 MiB"]
