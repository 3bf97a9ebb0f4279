"""Doctests in docstrings as blocks of code: an extension of griffe, which reads the docstrings.

In Markdown a line that opens with `>>>` is a quotation.
"""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*\n?(?:^(?!\s*$).*\n?)*", re.MULTILINE)
"""From a prompt to the next empty line: the calls and what they print."""


def fenced(text: str) -> str:
    """Put each doctest between fences."""
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)


class DoctestFences(griffe.Extension):
    """Changes every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
