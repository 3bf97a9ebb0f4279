"""Lets go of what was replayed and never asked for, when a backward ends or an exec group dies."""

import threading
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

from rekindle.replay.internals import graph_task_id, when_backward_ends

if TYPE_CHECKING:
    from rekindle.replay.frame import Frame


class _Emptying:
    """The frames that replayed in one backward; they are emptied when autograd lets go of this.

    Autograd takes it for something to call when the backward ends, and lets go of it then: also if
    the backward fails, when nothing is called.
    """

    def __init__(self) -> None:
        self.frames: list[ref[Frame]] = []

    def __call__(self) -> None:
        pass

    def __del__(self) -> None:
        _empty_all(self.frames)


class _Current(threading.local):
    """The backward that runs on this thread, and whom it is to empty."""

    task = -1
    emptying: ref[_Emptying] | None = None


_current = _Current()


def empty_when_backward_ends(frame: "Frame") -> None:
    """Empty a frame when the backward that runs on this thread ends, however it ends."""
    task = graph_task_id()
    emptying = None if _current.emptying is None else _current.emptying()
    if emptying is None or _current.task != task:
        emptying = _Emptying()
        when_backward_ends(emptying)
        _current.task, _current.emptying = task, ref(emptying)
    emptying.frames.append(ref(frame))


def _empty_all(frames: list["ref[Frame]"]) -> None:
    for weak in frames:
        frame = weak()
        if frame is not None:
            frame.empty()


def empty_when_group_dies(group: Any, frame: "Frame") -> None:
    """The calls of one exec group share what is replayed, for as long as there is the group."""
    finalize(group, _empty_all, [ref(frame)])
