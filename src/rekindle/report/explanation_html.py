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
from rekindle.sizes import format_bytes

_ROWS = 8
_STYLE = """
.rekindle{color-scheme:light dark;font:13px/1.4 sans-serif;color:#222;background:#fff;padding:8px}
.rekindle table{border-collapse:collapse;margin:6px 0;color:inherit}
.rekindle caption{text-align:left;font-weight:600}
.rekindle th,.rekindle td{padding:1px 10px 1px 0;text-align:left;vertical-align:top;color:inherit}
.rekindle .n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.rekindle .bar{background:#d9480f;height:8px;display:block}
.rekindle code{font-size:12px;background:none;color:inherit}
@media(prefers-color-scheme:dark){.rekindle{color:#ddd;background:#1b1b1b}
.rekindle .bar{background:#ff922b}}
"""


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
    saved = (f"<li>{escape(format_saved(each))}</li>" for each in found.saved[:_ROWS])
    changes = (
        f"<li>{escape(each.name)}: {escape(format_effect(found, each))}"
        f"<br><code>{escape(each.how)}</code></li>"
        for each in found.changes
    )
    others = (f"<li>{escape(e.name)}: {escape(format_effect(found, e))}</li>" for e in found.others)
    unhelpful = (f"<li>{escape(format_unhelpful(each))}</li>" for each in found.unhelpful)
    parts += [
        _list("largest saved tensors", saved),
        _list("changes, the most useful first", changes),
        _list("also", others),
        _list("no help", unhelpful),
    ]
    return f'<div class="rekindle"><style>{_STYLE}</style>{"".join(parts)}</div>'


def _table(title: str, shares: Iterable[Share], whole: int) -> str:
    rows = [each for each in shares if each.highest][:_ROWS]
    head = '<th class="n">at peak</th><th class="n">at most</th><th></th>'
    body = "".join(
        f"<tr><td>{escape(each.name)}</td><td class=n>{format_bytes(each.at_peak)}</td>"
        f"<td class=n>{format_bytes(each.highest)}</td>"
        f'<td><span class="bar" style="width:{160 * each.at_peak // max(whole, 1)}px"></span></td>'
        "</tr>"
        for each in rows
    )
    return f"<table><tr><th>{title}</th>{head}</tr>{body}</table>" if rows else ""


def _list(title: str, items: Iterable[str]) -> str:
    text = "".join(items)
    return f"<b>{title}</b><ul>{text}</ul>" if text else ""
