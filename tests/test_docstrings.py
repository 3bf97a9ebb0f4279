"""Docstrings open with what a thing is or does, and with its subject."""

import ast
import re
from pathlib import Path

import pytest

import rekindle

SOURCE = Path(rekindle.__file__).parent
FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))
RIDDLES = re.compile(r"(What|Whether|The same)\b")


def docstrings(source: str) -> list[str]:
    """The docstrings of a file: of modules, classes, functions, and those below values."""
    bodies = (getattr(node, "body", None) for node in ast.walk(ast.parse(source)))
    return [
        str(statement.value.value)
        for body in bodies
        for statement in (body if isinstance(body, list) else [])
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    ]


def riddles(source: str) -> list[str]:
    """The first lines of docstrings that open with no subject."""
    return [text.splitlines()[0] for text in docstrings(source) if RIDDLES.match(text)]


@pytest.mark.parametrize("file", FILES)
def test_docstrings_open_with_a_subject(file: str) -> None:
    assert riddles((SOURCE / file).read_text()) == []


def test_every_kind_of_docstring_is_looked_at() -> None:
    """A contrived file, to show that the check above can fail."""
    source = '''
"""What a module holds."""
value = 1
"""Whether it is one."""
class Thing:
    """The same thing."""
    field: int
    """What it counts."""
    def method(self):
        """Whether it runs."""
'''
    assert len(riddles(source)) == 5
    assert riddles('def f():\n    """Returns whether it runs."""') == []
