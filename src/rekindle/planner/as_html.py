"""HTML of a value, for notebooks; `report` writes it."""

from functools import singledispatch
from html import escape

from rekindle.planner.as_text import as_text


@singledispatch
def as_html(value: object) -> str:
    """The HTML that a report has registered for values of a class; else their text."""
    return f"<pre>{escape(as_text(value))}</pre>"
