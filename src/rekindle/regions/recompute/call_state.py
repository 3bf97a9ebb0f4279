"""The objects that one call of a region may write to, and what they held when it began.

Note [Objects among the arguments] in object_state.py says what becomes of them.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from rekindle.errors import CheckpointError
from rekindle.observation import region_name
from rekindle.regions.errors.mismatch import state_lost
from rekindle.regions.recompute.containers import leads_to_object
from rekindle.regions.recompute.packing import Packing
from rekindle.regions.recompute.state_tensors import Path
from rekindle.regions.recompute.unpacking import as_they_were, holds_what_it_held


class CallState:
    """Objects that the arguments of one call lead to, and the tensors that these hold."""

    __slots__ = ("_function", "_left_alone", "_objects", "_tensors", "bound")

    def __init__(self, function: Callable[..., Any], packing: Packing, bound: Any) -> None:
        self._function = function
        self._objects = packing.objects
        self._tensors = packing.tensors
        self._left_alone = packing.left_alone
        """Arguments that a replay finds as they are then, and what they are."""
        self.bound = bound
        """The packed arguments that a partial brings with it, if the function is one."""

    def close(self) -> None:
        """The forward has ended: see what it wrote to, and hold no more than a replay needs."""
        for state in self._objects:
            original = state.original()
            state.written = original is None or not holds_what_it_held(state, original, [])
        memory = [tensor.written_memory() for tensor in self._tensors]
        count = Counter(memory)
        for tensor, key in zip(self._tensors, memory, strict=True):
            if key is not None and count[key] > 1:
                tensor.forget_copy()
            tensor.close()

    def was_written_to(self) -> bool:
        """True if the forward wrote to an object, or in place to a tensor that one holds."""
        changed = any(tensor.has_changed() for tensor in self._tensors)
        self.close()
        return changed or any(state.written for state in self._objects)

    def originals(self) -> dict[int, Any]:
        """The objects that are what they were, by the id of their state."""
        return as_they_were(self._objects)

    def lost(self, path: Path) -> CheckpointError:
        """The error of whoever uses a tensor that is not what it was."""
        return state_lost(self._function, name_of(path, self._function))

    def left_alone(self) -> list[str]:
        """The arguments that a replay finds as they are then, for an error to name."""
        return [f"{name_of(path, self._function)} ({what})" for path, what in self._left_alone]

    def note_on(self, error: BaseException) -> None:
        """Add a note to an error of a replay that names arguments which may have caused it."""
        if self._left_alone and not isinstance(error, CheckpointError):
            error.add_note(
                f"This was raised in a replay of {region_name(self._function)}. As they are now, "
                f"not as in forward: {', '.join(self.left_alone())}."
            )


def name_of(path: Path, function: Callable[..., Any]) -> str:
    """A path among the arguments as one would write it in the function."""
    holder, step, key = path
    if holder is not None:
        name = name_of(holder, function)
        if step == "attribute":
            return f"{name}.{key}"
        return f"{name}[{key!r}]" if step == "item" and key is not None else f"{name}[…]"
    if isinstance(key, int):
        return _parameter_name(function, key)
    return key or "an argument"


def _parameter_name(function: Any, position: int) -> str:
    """The name that a function has for an argument; its number if it has none."""
    try:
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    if position < len(parameters) and parameters[position].kind in _POSITIONAL:
        return parameters[position].name
    return f"argument {position + 1}"


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Bound(NamedTuple):
    """The function and the arguments that a partial, and partials in it, bring with them."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def bound_state(function: Any) -> Bound | None:
    """A partial taken apart; None if what it brings with it leads to no object.

    Lists and dicts that lead to none are the function's own, as what a closure holds is.
    """
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    while type(function) is functools.partial:
        args, kwargs = (*function.args, *args), function.keywords | kwargs
        function = function.func
    if any(map(leads_to_object, (*args, *kwargs.values()))):
        return Bound(function, args, kwargs)
    return None
