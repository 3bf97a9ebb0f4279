"""Finds the largest size whose step is within a limit, by few tries.

The least peak of a step grows with its batch in a straight line, or with a square where attention
keeps its scores: the parabola through three sizes that were tried says where the limit is crossed.
Only tries count: the answer was tried and fits, and so was the next size, which does not. A bad
parabola costs tries, never the answer: where it does not halve the bracket, the middle is tried.
"""

from collections.abc import Callable, Iterable, Mapping

_GROWTH = 16
"""How many times the largest size that fits the next try may be, while none is too large."""
_PATIENCE = 2
"""Tries by a parabola that may leave more than half of the bracket, before its middle is tried."""
_CLOSE = 1.4
"""Sizes that differ by less than this factor have about the same throughput."""


def largest_within(peak_of: Callable[[int], float], limit: int, highest: int) -> int:
    """Return the largest whole number from 1 on whose peak is within a limit; 0 if none is.

    Numbers above `highest` are not tried. Peaks are taken to grow; one that is too high to be known
    is infinite.

    >>> tried = []
    >>> largest_within(lambda size: tried.append(size) or 10 + 3 * size, 1000, highest=10**6)
    330
    >>> tried
    [1, 2, 32, 330, 331]
    """
    peaks = {1: peak_of(1)}
    if peaks[1] > limit:
        return 0
    low, high, guess, patience = 1, highest + 1, 2, _PATIENCE
    stride = 1
    """How far above `low` the next try is at least: more where peaks grow in steps."""
    while high - low > 1:
        width, before = high - low, low
        peaks[guess] = peak_of(guess)
        low, high = (guess, high) if peaks[guess] <= limit else (low, guess)
        stride *= 2 if 1 < before < low <= before + stride else 1
        patience = _PATIENCE if 2 * (high - low) <= width else patience - 1
        guess = crossing(peaks, limit, low, high - 1)
        if high not in peaks:
            guess = min(guess, _GROWTH * low)
        elif patience <= 0 or (guess == high - 1 and peaks[high] == float("inf")):
            guess, patience = (low + high) // 2, _PATIENCE
        guess = max(guess, min(low + stride, (low + high) // 2), low + 1)
    return low


def crossing(peaks: Mapping[int, float], limit: int, low: int, high: int) -> int:
    """Return the size from `low` to `high` up to which a parabola through known peaks is within.

    The parabola goes through `low`, which is known and fits, the next size that does not fit, and
    the sizes that are closest to `low`.
    """
    known = [size for size in peaks if peaks[size] != float("inf")]
    above = [size for size in known if size > low]
    near = sorted(known, key=lambda size: (size != min(above, default=0), abs(size - low)))[:3]
    while high > low:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _between(peaks, near, middle) <= limit else (low, middle - 1)
    return low


def _between(peaks: Mapping[int, float], near: list[int], size: int) -> float:
    """The peak of a size by the polynomial through those near it, by Lagrange's formula."""
    total = 0.0
    for one in near:
        weight = 1.0
        for other in near:
            if other != one:
                weight *= (size - other) / (one - other)
        total += weight * peaks[one]
    return total


def halvings(largest: int, tried: Iterable[int], most: int) -> list[int]:
    """Return sizes below the largest, each half of the one before, that none tried is close to.

    >>> halvings(330, [1, 2, 32, 330], most=3)
    [165, 82, 20]
    """
    found: list[int] = []
    known = set(tried)
    size = largest // 2
    while size and len(found) < most:
        if not any(size <= _CLOSE * other and other <= _CLOSE * size for other in known):
            found.append(size)
        size //= 2
    return found
