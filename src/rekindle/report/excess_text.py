"""Text of a step that peaks above a limit: by how much, and what holds most."""

from collections.abc import Iterable

from rekindle.explanation.types import Change, Explanation
from rekindle.report.explanation_text import format_effect, format_saved
from rekindle.sizes import format_bytes

_ROWS = 5
"""Lines of code, and saved tensors, that are listed."""
_CHANGES = 3


def format_excess(
    found: Explanation, limit: int, name: str = "limit", changes: Iterable[Change] = ()
) -> str:
    """The text of an error: peak and limit, the largest contributors, and what would help."""
    over = found.peak - limit
    share = f" ({100 * over / limit:.1f} %)" if limit else ""
    step = f"The training step of {found.model} as on {found.device}"
    above = f"{format_bytes(over)}{share} above the {name} of {_exact(limit)}"
    kinds = sorted(found.kinds, key=lambda each: -each.at_peak)
    at_peak = (f"{e.name} {format_bytes(e.at_peak)}" for e in kinds if e.at_peak)
    lines = [
        f"{step} peaks at {_exact(found.peak)}: {above}.",
        f"  the peak is in {found.peak_at}",
        f"  at the peak: {', '.join(at_peak)}",
    ]
    lines += _section(
        "most is held by",
        (
            f"{format_bytes(each.at_peak)}: {each.name}  {each.about}"
            for each in found.lines[:_ROWS]
            if each.at_peak
        ),
    )
    lines += _section("largest saved tensors", map(format_saved, found.saved[:_ROWS]))
    lines += _section(
        "what would help",
        (
            f"{each.name}: {format_effect(found, each)}" + (f": {each.how}" if each.how else "")
            for each in _most_helpful(changes, limit)
        ),
    )
    return "\n".join(lines)


def _most_helpful(changes: Iterable[Change], limit: int) -> list[Change]:
    """Changes that leave the step as it is, those by which it is within the limit first."""
    found = [each for each in changes if each.same_step]
    return sorted(found, key=lambda each: each.peak > limit)[:_CHANGES]


def _exact(nbytes: int) -> str:
    """Bytes for people, and exactly: two that differ by little look alike."""
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"


def _section(title: str, items: Iterable[str]) -> list[str]:
    found = [f"    {item}" for item in items]
    return [f"  {title}", *found] if found else []
