"""Call sites: the lines of the user's code that saved activations.

A site is recorded for every activation in forward, so it must cost next to nothing: two code
objects and two bytecode offsets. Lines, columns and source text are looked up when an error is
written.
"""

import linecache
import os
import sys
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType
from typing import TypeAlias

import torch

RawSite: TypeAlias = tuple[CodeType, int] | tuple[CodeType, int, CodeType, int]
"""The Python call that ran an op, as code object and offset; and, if that is in torch's own Python,
the nearest one in user code."""

_DEEP = 12
"""How far up to look for user code: `self.up(x)` is three frames above the op it runs, and what
records a region takes some more."""
_LIBRARY = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep,
    "<frozen ",
)


class _LibraryFiles(dict[str, bool]):
    """Maps a file name to True if the file is torch's or ours; each name is looked up once."""

    def __missing__(self, filename: str) -> bool:
        self[filename] = known = filename.startswith(_LIBRARY)
        return known


library = _LibraryFiles()


def record(depth: int = 2) -> RawSite:
    """The site of the op that is running; `depth` counts the Python frames that are ours."""
    frame = frame_at(depth)
    code = frame.f_code
    return with_user_code(frame) if library[code.co_filename] else (code, frame.f_lasti)


def frame_at(depth: int) -> FrameType:
    """The Python frame `depth` calls above the caller, or the topmost there is.

    A thread of autograd's own runs nothing of Python but hooks and modes: nobody calls these.
    """
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        frame = sys._getframe(1)
        while frame.f_back is not None:
            frame = frame.f_back
        return frame


def with_user_code(frame: FrameType) -> RawSite:
    """The site of an op that torch's own Python ran, with the user's line above it."""
    above = frame.f_back
    for _ in range(_DEEP):
        if above is None:
            break
        if not library[above.f_code.co_filename]:
            return frame.f_code, frame.f_lasti, above.f_code, above.f_lasti
        above = above.f_back
    return frame.f_code, frame.f_lasti


@dataclass(frozen=True)
class Site:
    """A raw site as people read it: file, line, function and source text."""

    file: str
    line: int
    function: str
    source: str
    """The line of user code, stripped."""
    op: str
    """The very expression that saved the activation: in user code and, under it, in torch's."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def look_up(raw: RawSite) -> Site:
    """The lines and expressions that a raw site stands for."""
    (inner, inner_at), (outer, outer_at) = raw[:2], raw[-2:]
    line, source = _source(outer, outer_at)
    op = _expression(outer, outer_at)
    if inner is not outer:
        op = f"{op} → {_expression(inner, inner_at)}"
    return Site(_short(outer.co_filename), line, outer.co_qualname, source, op)


def _short(filename: str) -> str:
    relative = os.path.relpath(filename) if os.path.isabs(filename) else filename
    return filename if relative.startswith("..") else relative


def _positions(code: CodeType, at: int) -> tuple[int | None, int | None, int | None, int | None]:
    return next(islice(code.co_positions(), at // 2, None), (None, None, None, None))


def _source(code: CodeType, at: int) -> tuple[int, str]:
    line = _positions(code, at)[0] or code.co_firstlineno
    return line, linecache.getline(code.co_filename, line).strip()


def _expression(code: CodeType, at: int) -> str:
    """The source text of the one expression at a bytecode offset, on one line."""
    start, end, left, right = _positions(code, at)
    if start is None or end is None or left is None or right is None:
        return _source(code, at)[1] or code.co_qualname
    rows = [linecache.getline(code.co_filename, row).encode() for row in range(start, end + 1)]
    if not any(rows):
        return code.co_qualname
    rows[-1] = rows[-1][:right]
    rows[0] = rows[0][left:]
    text = " ".join(b" ".join(rows).decode(errors="replace").split())
    return text if len(text) <= 90 else text[:89] + "…"
