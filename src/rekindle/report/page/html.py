"""A page's document as one file of HTML, with the style and the scripts of `assets/` in it."""

import json
import re
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
    # In one pass: a part may have text that looks like the place of another one.
    return re.sub(r"\[\[(\w+)\]\]", lambda place: parts[place[1]], _asset("page.html"))


def as_script_data(document: dict[str, Any]) -> str:
    r"""JSON that may stand in a `<script>` element, whatever texts are in it.

    >>> as_script_data({"model": "</script><!--"})
    '{"model":"\\u003c/script>\\u003c!--"}'
    """
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _asset(name: str) -> str:
    return (files("rekindle.report.page") / "assets" / name).read_text(encoding="utf-8")
