"""HTML of explanations, which notebooks show: tables that need nothing from elsewhere."""

from collections.abc import Iterable
from html import escape

from rekindle.explanation.types import Explanation, Share
from rekindle.planner.as_html import as_html
from rekindle.report.explanation_text import (
    format_effect,
    format_fit,
    format_saved,
    format_unhelpful,
    grouped_modules,
)
from rekindle.report.html_parts import framed, listed, table
from rekindle.sizes import format_bytes

_ROWS = 8


@as_html.register
def explanation_to_html(found: Explanation) -> str:
    """The HTML of an explanation: the tables of its text."""
    peak = f"peak {format_bytes(found.peak)} in {escape(found.peak_at)}"
    parts = [f"<p><b>{escape(found.model)}</b> on {escape(found.device)}: {peak}</p>"]
    if found.device_bytes is not None:
        parts.append(f"<p>{format_bytes(found.device_bytes)}: {format_fit(found.fits)}</p>")
    kinds = sorted(found.kinds, key=lambda each: -each.at_peak)
    parts += [
        _table("kind", kinds, found.peak),
        _table("module", grouped_modules(found), found.peak),
        _table("line", found.lines, found.peak),
    ]
    saved = (escape(format_saved(each)) for each in found.saved[:_ROWS])
    changes = (
        f"{escape(each.name)}: {escape(format_effect(found, each))}"
        f"<br><code>{escape(each.how)}</code>"
        for each in found.changes
    )
    others = (f"{escape(each.name)}: {escape(format_effect(found, each))}" for each in found.others)
    unhelpful = (escape(format_unhelpful(each)) for each in found.unhelpful)
    parts += [
        listed("largest saved tensors", saved),
        listed("changes, the most useful first", changes),
        listed("also", others),
        listed("no help", unhelpful),
    ]
    return framed(parts)


def _table(title: str, shares: Iterable[Share], whole: int) -> str:
    rows = [each for each in shares if each.highest][:_ROWS]
    cells = (
        (
            escape(each.name),
            format_bytes(each.at_peak),
            format_bytes(each.highest),
            f'<span class="bar" style="width:{160 * each.at_peak // max(whole, 1)}px"></span>',
        )
        for each in rows
    )
    return table((title, "at peak", "at most", ""), cells, numbers=(1, 2))
