"""Text of frontiers, which they print as: a row for each plan."""

from rekindle.planner.as_text import as_text
from rekindle.planner.frontier import Frontier, Point
from rekindle.planner.plan import format_choice
from rekindle.sizes import format_bytes, format_count

HEADS = ("peak", "vs plain", "time", "vs plain", "blocks")
"""The titles of the columns: bytes, seconds, and both in comparison with a step without a plan."""


@as_text.register
def format_frontier(frontier: Frontier) -> str:
    """The text of a frontier: a table of peaks, times and what blocks do."""
    if not frontier:
        return "Frontier: no points"
    rows = [HEADS, *(row_of(point) for point in frontier)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [format_title(frontier)]
    for *cells, blocks in rows:
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths, strict=False))
        lines.append(f"  {'  '.join(aligned)}  {blocks}")
    return "\n".join(lines)


def format_title(frontier: Frontier) -> str:
    """The model, the device and the batch of a frontier, with the number of its plans."""
    plan = frontier[0].plan
    count = format_count(len(frontier), "plan")
    return f"Frontier of {plan.model} on {plan.device}, batch {plan.batch}: {count}"


def row_of(point: Point) -> tuple[str, ...]:
    """The cells of a point's row, in the order of `HEADS`."""
    plan = point.plan
    saved = point.peak / plan.plain_peak - 1 if plan.plain_peak else 0.0
    return (
        format_bytes(point.peak),
        f"{100 * saved:+.0f} %" if round(100 * saved) else "",
        f"{point.seconds * 1e3:.1f} ms",
        f"{plan.slowdown:.2f}x",
        format_choice(plan),
    )
