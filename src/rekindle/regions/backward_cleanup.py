"""Lets go of what was brought back and never asked for: a backward ends, or an exec group dies."""

import threading
from typing import Any, Protocol
from weakref import finalize, ref

from rekindle.torch_private.autograd_graph import graph_task_id, when_backward_ends


class Holder(Protocol):
    """Holds activations that it can get again."""

    def empty(self) -> None:
        """Let go of them."""


class _Emptying:
    """Who got activations back in one backward; they are emptied when autograd lets go of this.

    Autograd takes it for something to call when the backward ends, and lets go of it then: also if
    the backward fails, when nothing is called.
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
    """The backward that runs on this thread, and whom it is to empty."""

    task = -1
    emptying: ref[_Emptying] | None = None


_current = _Current()


def empty_when_backward_ends(holder: Holder) -> None:
    """Empty a holder when the backward that runs on this thread ends, however it ends."""
    task = graph_task_id()
    emptying = None if _current.emptying is None else _current.emptying()
    if emptying is None or _current.task != task:
        emptying = _Emptying()
        when_backward_ends(emptying)
        _current.task, _current.emptying = task, ref(emptying)
    emptying.holders.append(ref(holder))


def _empty_all(holders: list["ref[Holder]"]) -> None:
    for weak in holders:
        holder = weak()
        if holder is not None:
            holder.empty()


def empty_when_group_dies(group: Any, holder: Holder) -> None:
    """The calls of one exec group share what is replayed, for as long as there is the group."""
    finalize(group, _empty_all, [ref(holder)])
