"""Clean-up of activations that were brought back for a backward and never asked for.

It happens when the backward ends, in whatever way; under an exec group, when the group dies.
"""

import threading
from typing import Any, Protocol
from weakref import finalize, ref

from rekindle.torch_private.autograd_graph import graph_task_id, when_backward_ends


class Holder(Protocol):
    """An object that holds activations which it can bring back once more."""

    def empty(self) -> None:
        """Release the activations."""


class _EmptyAtEnd:
    """Empties the holders of one backward when autograd drops it.

    Autograd holds it as a callback for the end of the backward, and drops it then; also if the
    backward fails, when no callback is called.
    """

    def __init__(self) -> None:
        self.holders: list[ref[Holder]] = []

    def __call__(self) -> None:
        pass

    def __del__(self) -> None:
        if not hasattr(self, "holders"):  # it was interrupted before it was begun
            return
        try:
            _empty_all(self.holders)
        except BaseException:  # Ctrl-C, of which nobody hears that strikes in here
            _empty_all(self.holders)
            raise


class _Current(threading.local):
    """The backward that runs on this thread, and the callback that empties its holders."""

    task = -1
    callback: ref[_EmptyAtEnd] | None = None


_current = _Current()


def empty_when_backward_ends(holder: Holder) -> None:
    """Empty a holder when the backward that runs on this thread ends, however it ends."""
    task = graph_task_id()
    callback = None if _current.callback is None else _current.callback()
    if callback is None or _current.task != task:
        callback = _EmptyAtEnd()
        when_backward_ends(callback)
        _current.task, _current.callback = task, ref(callback)
    callback.holders.append(ref(holder))


def _empty_all(holders: list["ref[Holder]"]) -> None:
    for weak in holders:
        holder = weak()
        if holder is not None:
            holder.empty()


def empty_when_group_dies(group: Any, holder: Holder) -> None:
    """Empty a holder when an exec group dies: until then its calls share what is replayed."""
    finalize(group, _empty_all, [ref(holder)])
