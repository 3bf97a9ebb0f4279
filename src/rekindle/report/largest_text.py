"""Text of the largest batch or sequence, which it prints as."""

from rekindle.planner.as_text import as_text
from rekindle.planner.largest import Largest, TriedSize
from rekindle.planner.plan import format_choice
from rekindle.sizes import format_bytes


@as_text.register
def format_largest(found: Largest) -> str:
    """The text of the largest size that fits: a table of the sizes that were tried."""
    rows = table_rows(found)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [format_answer(found)]
    for *cells, blocks in rows:
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths, strict=False))
        lines.append(f"  {'  '.join(aligned)}  {blocks}")
    return "\n".join(lines)


def format_answer(found: Largest) -> str:
    """One line: the largest size, and the one with the best throughput."""
    within = f"{found.model} on {found.device} within {format_bytes(found.budget)}"
    capped = ", the most that was allowed" if found.capped else ""
    best = found.best
    where = "there" if best.size == found.size else f"at {best.size}"
    throughput = f"{_per_second(best)} {found.unit}/s {where}"
    return f"Largest {found.over} of {within}: {found.size}{capped}; at best {throughput}"


def table_rows(found: Largest) -> list[list[str]]:
    """The cells of a table, with its head: a row for each size that was tried."""
    head = [found.over, "peak", "time", "vs plain", f"{found.unit}/s", "blocks"]
    return [head, *(_row(found, each) for each in found.tried)]


def _row(found: Largest, tried: TriedSize) -> list[str]:
    if tried.plan is None:
        peak = "out of memory" if tried.peak is None else format_bytes(tried.peak)
        return [str(tried.size), peak, "", "", "", "does not fit"]
    marks = ["largest"] if tried == found.largest else []
    marks += ["best throughput"] if tried == found.best else []
    blocks = format_choice(tried.plan)
    return [
        str(tried.size),
        format_bytes(tried.plan.predicted_peak),
        f"{tried.plan.predicted_time * 1e3:.1f} ms",
        f"{tried.plan.slowdown:.2f}x",
        _per_second(tried),
        f"{', '.join(marks)}: {blocks}" if marks else blocks,
    ]


def _per_second(tried: TriedSize) -> str:
    speed = tried.per_second
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}"
