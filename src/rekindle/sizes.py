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
            raise ValueError(f'{what} should be like "24GiB" or "800MB", but got {value!r}')
        return int(Fraction(match[1]) * _UNITS[unit])
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f'{what} should be a whole number of bytes or text like "24GiB", '
            f"but got {type(value).__name__}"
        )
    if value < 0:
        raise ValueError(f"{what} should not be negative, but got {value}")
    return value


def format_bytes(count: float) -> str:
    """A number of bytes for people.

    >>> format_bytes(3 * 2**29)
    '1.5 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(round(count, 1)) < 1024:
            return f"{count:.1f} {unit}".replace(".0 ", " ")
        count /= 1024
    return f"{count:.1f} TiB".replace(".0 ", " ")


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
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
    unit, size = next(((unit, size) for unit, size in units if nbytes >= size), ("B", 1))
    whole, tenth = divmod(-(-10 * nbytes // size), 10)
    return f"{whole}.{tenth}{unit}" if tenth else f"{whole}{unit}"
