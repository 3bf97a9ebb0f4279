"""A page's document as one file of HTML, with the style and the scripts of `assets/` in it."""

import json
from html import escape
from importlib.resources import files
from typing import Any

SCRIPTS = (
    "format.js",
    "dom.js",
    "details.js",
    "curve.js",
    "steps.js",
    "strip.js",
    "plans.js",
    "areas.js",
    "explanation.js",
    "main.js",
)
"""The scripts, in the order in which a page has them: later ones use earlier ones."""


def page_html(document: dict[str, Any]) -> str:
    """Return the HTML of a page; it loads nothing from elsewhere."""
    parts = {
        "title": escape(f"{document['model']} on {document['device']}: rekindle"),
        "style": _asset("page.css"),
        "document": as_script_data(document),
        "script": "\n".join(_asset(name) for name in SCRIPTS),
    }
    text = _asset("page.html")
    for name, part in parts.items():
        text = text.replace(f"[[{name}]]", part, 1)
    return text


def as_script_data(document: dict[str, Any]) -> str:
    r"""JSON that may stand in a `<script>` element, whatever texts are in it.

    >>> as_script_data({"model": "</script><!--"})
    '{"model":"\\u003c/script>\\u003c!--"}'
    """
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _asset(name: str) -> str:
    return (files("rekindle.report.page") / "assets" / name).read_text(encoding="utf-8")
