"""Parts of the HTML that notebooks show: it needs nothing from elsewhere, in light and dark."""

from collections.abc import Iterable, Sequence
from html import escape

COLORS = {
    "keep": "#4c9f70",
    "recompute": "#d9480f",
    "offload": "#3b7dd8",
    "spill": "#8a63c9",
    "tile": "#b58a00",
}
"""A color for each thing that is done with activations."""
_STYLE = """
.rekindle{color-scheme:light dark;font:13px/1.4 sans-serif;color:#222;background:#fff;padding:8px;
overflow-x:auto}
.rekindle table{border-collapse:collapse;margin:6px 0;color:inherit}
.rekindle caption{text-align:left;font-weight:600}
.rekindle th,.rekindle td{padding:1px 10px 1px 0;text-align:left;vertical-align:top;color:inherit}
.rekindle .n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.rekindle .bar{background:#d9480f;height:8px;display:block}
.rekindle .strip{display:flex;width:320px;height:12px;margin:3px 0;gap:1px}
.rekindle .strip i{flex:1}
.rekindle .key{display:inline-block;width:10px;height:10px;margin:0 4px 0 8px}
.rekindle code{font-size:12px;background:none;color:inherit}
@media(prefers-color-scheme:dark){.rekindle{color:#ddd;background:#1b1b1b}
.rekindle .bar{background:#ff922b}}
"""


def framed(parts: Iterable[str]) -> str:
    """Parts in a frame of their own, whose style reaches nothing else on the page."""
    return f'<div class="rekindle"><style>{_STYLE}</style>{"".join(parts)}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """A table of cells that are HTML; the columns `numbers` are aligned to the right."""
    right = set(numbers)
    body = "".join(f"<tr>{_cells('td', row, right)}</tr>" for row in rows)
    return f"<table><tr>{_cells('th', heads, right)}</tr>{body}</table>" if body else ""


def _cells(tag: str, cells: Sequence[str], right: set[int]) -> str:
    return "".join(
        f"<{tag}{' class=n' if i in right else ''}>{cell}</{tag}>" for i, cell in enumerate(cells)
    )


def listed(title: str, items: Iterable[str]) -> str:
    """A list of items that are HTML, under a title; nothing if there are none."""
    text = "".join(f"<li>{item}</li>" for item in items)
    return f"<b>{title}</b><ul>{text}</ul>" if text else ""


def strip(blocks: Iterable[tuple[Sequence[str], str]]) -> str:
    """A strip with a cell for each block: the words for what it does, and a text to hover over."""
    cells = "".join(
        f'<i style="background:{_background(words)}" title="{escape(text)}"></i>'
        for words, text in blocks
    )
    return f'<span class="strip">{cells}</span>'


def legend(words: Iterable[str]) -> str:
    """The colors of some words."""
    keys = (f'<i class="key" style="background:{COLORS[word]}"></i>{word}' for word in words)
    return f"<p>{''.join(keys)}</p>"


def _background(words: Sequence[str]) -> str:
    """A color; of several, bands one below the other."""
    if len(words) == 1:
        return COLORS[words[0]]
    share = 100 / len(words)
    bands = (f"{COLORS[w]} {i * share:.0f}% {(i + 1) * share:.0f}%" for i, w in enumerate(words))
    return f"linear-gradient({','.join(bands)})"
