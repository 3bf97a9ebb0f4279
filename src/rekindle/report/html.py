"""HTML of plans, profiles and frontiers, which notebooks show."""

from collections.abc import Iterable
from html import escape

from rekindle.planner.as_html import as_html
from rekindle.planner.frontier import Frontier
from rekindle.planner.plan import Plan
from rekindle.planner.types import Candidate, Profile
from rekindle.report.frontier_text import HEADS, format_title, row_of
from rekindle.report.html_parts import COLORS, framed, legend, strip, table
from rekindle.report.text import format_plan_title, format_rest, grouped_blocks, plan_figures
from rekindle.sizes import format_bytes

_COSTS = ("held", "moved", "time")


@as_html.register
def plan_to_html(plan: Plan) -> str:
    """The HTML of a plan: its figures, a strip of its blocks, and a row for each group of them."""
    figures = ((f"<b>{name}</b>", escape(text)) for name, text in plan_figures(plan))
    groups = [
        (escape(where), f"{count} x {escape(kind)}", *_candidate_cells(candidate))
        for where, kind, count, candidate in grouped_blocks(plan)
    ]
    groups += [
        (escape(path), f"1 x {escape(kind)}", escape(str(strategy)), "", "", "")
        for path, kind, strategy in plan.heads
    ]
    return framed(
        [
            f"<p><b>{escape(format_plan_title(plan))}</b></p>",
            table(("", ""), figures),
            strip(
                (candidate.words, f"{path or kind}: {candidate.describe()}")
                for path, kind, candidate in plan.blocks
            ),
            legend(_words_in([plan])),
            table(("blocks", "", "strategy", *_COSTS), groups, numbers=(3, 4, 5)),
        ]
    )


@as_html.register
def profile_to_html(profile: Profile) -> str:
    """The HTML of a profile: a table of candidates for each distinct block."""
    counts = f"{len(profile.order)} blocks, {len(profile.blocks)} distinct"
    always = f"always there: {format_bytes(profile.static_bytes)}"
    rest = escape("; ".join(map(format_rest, (profile.rest, *profile.rests))))
    parts = [
        f"<p><b>{escape(profile.model)}</b> on {escape(profile.device)}: {counts}</p>",
        f"<p>{always}; {rest}</p>",
    ]
    for block in profile.blocks:
        rows = map(_candidate_cells, block.candidates)
        parts.append(table((escape(block.kind), *_COSTS), rows, numbers=(1, 2, 3)))
    return framed(parts)


@as_html.register
def frontier_to_html(frontier: Frontier) -> str:
    """The HTML of a frontier: the table of its text, with a strip of blocks for each plan."""
    if not frontier:
        return framed(["<p>Frontier: no points</p>"])
    rows = [
        (
            *map(escape, row_of(point)),
            strip((c.words, path or k) for path, k, c in point.plan.blocks),
        )
        for point in frontier
    ]
    return framed(
        [
            f"<p><b>{escape(format_title(frontier))}</b></p>",
            table((*HEADS, ""), rows, numbers=range(4)),
            legend(_words_in(point.plan for point in frontier)),
        ]
    )


def _candidate_cells(candidate: Candidate) -> tuple[str, ...]:
    """The cells of a candidate: its description, and those of `_COSTS`."""
    return (
        escape(candidate.describe()),
        format_bytes(candidate.bytes_held),
        format_bytes(candidate.bytes_moved) if candidate.bytes_moved else "",
        f"{candidate.seconds * 1e3:.2f} ms",
    )


def _words_in(plans: Iterable[Plan]) -> list[str]:
    """The words of the blocks of some plans, in the order of the colors."""
    found = {word for plan in plans for _, _, each in plan.blocks for word in each.words}
    return [word for word in COLORS if word in found]
