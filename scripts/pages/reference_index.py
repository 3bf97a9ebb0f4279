"""The table of all public names, which `scripts/docs` puts into docs/reference/index.md.

A hook of mkdocs: the table is made of `rekindle.__all__` and the first lines of docstrings, so that
no list of names is kept by hand.
"""

import inspect
from typing import Any

import rekindle

PLACE = "<!-- all names -->"


def first_line(name: str) -> str:
    """The first line of a docstring; torch's own objects have their text on the page."""
    value = getattr(rekindle, name)
    module = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", "torch")
    if not module.startswith("rekindle"):
        return "torch's own object"
    return (inspect.getdoc(value) or "").partition("\n")[0]


def names_table() -> str:
    """Every public name with the first line of its docstring."""
    names = sorted(rekindle.__all__, key=str.lower)
    rows = [f"| [`{name}`][rekindle.{name}] | {first_line(name)} |" for name in names]
    return "\n".join(["| name | is |", "| --- | --- |", *rows])


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the table in its place: mkdocs calls this for every page."""
    return markdown.replace(PLACE, names_table())
