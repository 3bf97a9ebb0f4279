"""One call of a region under a policy: recorded in forward, made again from its record."""

from _thread import RLock
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from rekindle.emptying import empty_when_backward_ends
from rekindle.internals import (
    graph_task_id,
    pop_hooks,
    push_hooks,
    top_hooks,
    without_modes,
)
from rekindle.selective.mode import Keeps, RecordMode
from rekindle.selective.record import Value, make


class Region:
    """Entered around a region's forward; alive as long as autograd holds something of it."""

    def __init__(self, keeps: Keeps) -> None:
        self._mode = RecordMode(keeps, top_hooks(False))
        self._lock = RLock()
        self._made: list[ref[Value]] = []
        self._task = -1

    def __enter__(self) -> None:
        push_hooks(self._pack, _unpack)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        try:
            self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            pop_hooks()
            self._mode.close()

    def _pack(self, x: Tensor) -> "_Slot":
        return _Slot(self, self._mode.value_of(x))

    def get(self, value: Value) -> Tensor:
        """The tensor of a value, made again if need be."""
        with self._lock, without_modes():
            made: list[Value] = []
            tensor = value.tensor(made)
            if tensor is None:
                tensor = make(value, made)
            if made:
                self._made += map(ref, made)
                self._empty_in_time()
            return tensor

    def _empty_in_time(self) -> None:
        """See to it that what was made is let go when the backward ends; at once, if none runs."""
        task = graph_task_id()
        if task == -1:
            self.empty()
        elif task != self._task:
            self._task = task
            empty_when_backward_ends(self)

    def empty(self) -> None:
        """A backward has ended: let go of what was made for it."""
        with self._lock:
            for weak in self._made:
                value = weak()
                if value is not None:
                    value.now = None
            self._made = []


class _Slot:
    """What autograd holds in place of a tensor that it saved."""

    __slots__ = ("_region", "_value")

    def __init__(self, region: Region, value: Value) -> None:
        self._region = region
        self._value = value

    def get(self) -> Tensor:
        return self._region.get(self._value)


def _unpack(slot: _Slot) -> Tensor:
    return slot.get()


def run(keeps: Keeps, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a region under a policy."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    with Region(keeps):
        return function(*args, **kwargs)
