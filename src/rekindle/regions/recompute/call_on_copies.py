"""Trying a call on copies of the objects among its arguments, to see which ones it writes to."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rekindle.regions.recompute.call_state import CallState, name_of
from rekindle.regions.recompute.containers import leads_to_object
from rekindle.regions.recompute.packing import Packing
from rekindle.regions.recompute.unpacking import Rebuilding


class CallOnCopies:
    """A call whose arguments lead to objects: each is copied, and each tensor that one holds."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._function = function
        packing = Packing(None, _ignore, function, (args, kwargs), keep_graphs=False)
        packed = packing.pack_bound(args, kwargs)
        for tensor in packing.tensors:
            tensor.use_copy()
        own_args, own_kwargs = Rebuilding(
            iter(()), iter(()), CallState(function, packing, None)
        ).of(packed)
        self.args: tuple[Any, ...] = tuple(own_args)
        self.kwargs: dict[str, Any] = own_kwargs
        self._states = {
            name: self._state_of(value)
            for name, value in (*enumerate(self.args), *self.kwargs.items())
            if leads_to_object(value)
        }

    def _state_of(self, value: Any) -> CallState:
        packing = Packing(None, _ignore, self._function, ((value,), {}), keep_graphs=False)
        packing.pack_bound((value,), {})
        return CallState(self._function, packing, None)

    def written_to(self) -> list[str]:
        """The arguments that the call wrote to, with their classes; asked once, after it."""
        return [
            f"{name_of((None, 'argument', name), self._function)} ({type(value).__name__})"
            for name, value in (*enumerate(self.args), *self.kwargs.items())
            if name in self._states and self._states[name].was_written_to()
        ]


def copies_for(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CallOnCopies | None:
    """The call on copies; None if its arguments lead to no object."""
    if any(map(leads_to_object, (*args, *kwargs.values()))):
        return CallOnCopies(function, args, kwargs)
    return None


def _ignore(_: Tensor) -> None:
    pass
