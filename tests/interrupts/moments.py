"""Raises `KeyboardInterrupt` at the n-th moment of a call at which CPython could.

CPython runs signal handlers on its main thread, and not between any two instructions: when a
function begins or a generator goes on, after a call, and when a loop jumps back. So these moments
can be counted with a trace function, and each of them can be tried. Those of rekindle and of what
it calls are: a model is torch's and the user's, and so are the contexts that it enters.
"""

import dis
import os
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

from torch import nn

import rekindle

_CALLS = frozenset(
    name for name in dis.opmap if name.startswith("CALL") and "INTRINSIC" not in name
)


@cache
def _moments_of(code: CodeType) -> frozenset[int]:
    """Offsets of instructions before which a signal handler may run."""
    found = set()
    handlers = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> int | None:
        around = [entry for entry in handlers if entry.start <= offset < entry.end]
        return around[-1].target if around else None

    instructions = list(dis.get_instructions(code))
    for instruction, after in pairwise(instructions):
        if instruction.opname in _CALLS:
            # What is raised here is raised by the next instruction. Where that has another handler,
            # as after the last call of a `try`, the moment cannot be tried in this way.
            if handler(instruction.offset) == handler(after.offset):
                found.add(after.offset)
        elif instruction.opname == "JUMP_BACKWARD":
            found.add(instruction.argval)
    return frozenset(found)


_OURS = os.path.dirname(rekindle.__file__)
_MODELS = (os.path.dirname(nn.__file__), os.path.dirname(os.path.dirname(__file__)))


def _is_ours(frame: FrameType | None) -> bool:
    """Whether rekindle runs, or has called what runs, and not by way of a model."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        if frame.f_code.co_filename.startswith(_MODELS):
            return False
        frame = frame.f_back
    return False


class Moments:
    """Counts the moments of a call, and interrupts it at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.count = 0
        self.where = ""
        """The place of the interrupt."""
        self._at = at

    def run(self, function: Callable[[], Any]) -> KeyboardInterrupt | None:
        """Call a function; the interrupt if it came out of it, with every frame it passed."""
        before = sys.gettrace()
        sys.settrace(self._begin)
        try:
            function()
        except KeyboardInterrupt as error:
            return error
        finally:
            sys.settrace(before)
        return None

    def _begin(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not _is_ours(frame):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self._pass(frame)
        return self._inside

    def _inside(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _moments_of(frame.f_code):
            self._pass(frame)
        return self._inside

    def _pass(self, frame: FrameType) -> None:
        if self.count == self._at:
            self.count += 1
            code = frame.f_code
            self.where = f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
            raise KeyboardInterrupt
        self.count += 1
