"""Copies of tensors that stand in for the originals in the arguments of a block while it runs.

A block may write to a list or a dict that it is called with, and its caller reads that afterwards.
So a block is given the caller's own containers: copies take the places of tensors in them, and the
originals are put back when the block has run. Attributes of objects of users' classes are treated
like entries of a dict. Tuples cannot be written to, and are made anew. Containers of other classes
are left alone: they hold their tensors anyway.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from rekindle.regions.recompute.object_state import layout_of
from rekindle.regions.recompute.random_generators import PLAIN
from rekindle.torch_private.version_counters import version_of


class StandInCopies:
    """Copies of some of the tensors among the arguments of one call."""

    def __init__(self, is_copied: Callable[[Tensor], bool]) -> None:
        self._is_copied = is_copied
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """The original and the copy of each tensor that is copied, by the original's id."""
        self._containers: list[Any] = []
        """Lists and dicts of the caller, or of its objects, in which a copy stands."""
        self._seen: set[int] = set()
        self._depth = 0

    def put_into(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments of the call, with the copies in them."""
        kwargs = {name: self._of(value) for name, value in kwargs.items()}
        return tuple(map(self._of, args)), kwargs

    @property
    def originals(self) -> list[Tensor]:
        """The tensors that were copied."""
        return [original for original, _ in self._copies.values()]

    def put_back(self) -> None:
        """Put the originals back where a copy still stands, unless the block wrote to the copy."""
        unwritten = {
            id(copy): original
            for original, copy in self._copies.values()
            if version_of(copy) in (0, -1)  # the latter: no counter
        }
        for container in self._containers:
            for key, value in _entries(container):
                if id(value) in unwritten:
                    container[key] = unwritten[id(value)]
        self._containers.clear()
        self._copies.clear()

    def _of(self, value: Any) -> Any:
        """The value that the block is given in place of another one: a copy, if it has tensors."""
        kind = type(value)
        if isinstance(value, Tensor):
            return self._copy(value)
        if kind in _WRITABLE:
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._put_into_container(value)
        elif kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_make")):
            parts = [self._of(part) for part in value]
            if any(a is not b for a, b in zip(parts, value, strict=True)):
                return tuple(parts) if kind is tuple else kind._make(parts)
        elif kind not in PLAIN and layout_of(kind) is not None:
            self._of(getattr(value, "__dict__", None))
        return value

    def _copy(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._copies:
            if not self._is_copied(tensor):
                return tensor
            self._copies[id(tensor)] = tensor, tensor.clone()
        return self._copies[id(tensor)][1]

    def _put_into_container(self, container: Any) -> None:
        if self._depth > _DEEPEST:
            return
        self._depth += 1
        changed = False
        for key, value in _entries(container):
            given = self._of(value)
            if given is not value:
                container[key] = given
                changed = True
        if changed:
            self._containers.append(container)
        self._depth -= 1


_WRITABLE = (list, dict, OrderedDict, defaultdict)
_DEEPEST = 64
"""How many lists and dicts may be inside one another for copies to be put into them."""


def _entries(container: Any) -> Iterator[tuple[Any, Any]]:
    """Keys or indices of a container with what is there; entries may be replaced meanwhile."""
    return iter(list(enumerate(container) if isinstance(container, list) else container.items()))
