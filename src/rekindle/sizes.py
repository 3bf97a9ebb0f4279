"""Sizes in bytes, and counts, as people write them."""

import re
from fractions import Fraction

_UNITS = {
    unit: 1024**power if "i" in unit else 1000**power
    for power, units in enumerate(
        [["B"], ["KB", "KiB"], ["MB", "MiB"], ["GB", "GiB"], ["TB", "TiB"]]
    )
    for unit in units
}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, what: str) -> int:
    """A number of bytes from a number or from text; `what` names it in an error.

    >>> parse_bytes("24GiB", "budget") == 24 * 2**30
    True
    >>> parse_bytes(4096, "min_bytes")
    4096
    """
    if isinstance(value, str):
        match = _WRITTEN.fullmatch(value)
        unit = match and next((u for u in _UNITS if u.lower() == (match[2] or "B").lower()), None)
        if not match or not unit or ("." in match[1] and not match[2]):
            raise ValueError(
                f'{what} should be like "24GiB" or "800MB", but got {value!r}{_meant(value)}'
            )
        return int(Fraction(match[1]) * _UNITS[unit])
    if isinstance(value, bool) or not isinstance(value, int):
        meant = _meant(f"{value:g}") if isinstance(value, float) else ""
        raise TypeError(
            f'{what} should be a whole number of bytes or text like "24GiB", '
            f"but got {type(value).__name__}{meant}"
        )
    if value < 0:
        raise ValueError(f"{what} should not be negative, but got {value}")
    return value


def _meant(text: str) -> str:
    """The end of an error: a size that a number, or a number with part of a unit, may stand for."""
    match = _WRITTEN.fullmatch(text)
    unit = match and next((u for u in ("KiB", "MiB", "GiB", "TiB") if u[0] == match[2].upper()), "")
    if not match or (match[2] and not unit):
        return ""
    return f': "{match[1]}{unit or "GiB"}", perhaps?'


def format_bytes(count: float, of: float | None = None) -> str:
    """A number of bytes for people; in the unit of another number, `of`, if it is a tenth of one.

    >>> format_bytes(3 * 2**29)
    '1.5 GiB'
    >>> format_bytes(300 * 2**20, of=2**31), format_bytes(3 * 2**20, of=2**31)
    ('0.3 GiB', '3 MiB')
    """
    power = _power(count)
    if of is not None and abs(count) >= 1024 ** _power(of) / 10:
        power = _power(of)
    return f"{count / 1024**power:.1f} {_BINARY[power]}".replace(".0 ", " ")


_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def _power(count: float) -> int:
    """The largest unit that a number has at least one of, once it is rounded to a tenth."""
    power = 0
    while power < len(_BINARY) - 1 and abs(round(count / 1024**power, 1)) >= 1024:
        power += 1
    return power


def rounded_up(nbytes: int) -> int:
    """The bytes that are a tenth of a unit, or more of them, and no less than some bytes.

    >>> format_bytes(rounded_up(3 * 2**29 + 1))
    '1.6 GiB'
    """
    size = int(1024 ** _power(nbytes))
    return -(-nbytes * 10 // size) * size // 10


def format_count(count: int, word: str) -> str:
    """A number of things for people.

    >>> format_count(1, "plan"), format_count(3, "plan")
    ('1 plan', '3 plans')
    """
    return f"{count} {word}{'' if count == 1 else 's'}"


def format_budget(nbytes: int) -> str:
    """Bytes as a budget is written in code, rounded up to a tenth of the unit.

    >>> format_budget(80 * 2**30), format_budget(3 * 2**19 + 1)
    ('80GiB', '1.6MiB')
    """
    return format_bytes(rounded_up(nbytes)).replace(" ", "")
