"""Tensors in nested containers, and in objects of users' classes there: found, and replaced.

What torch's pytrees do for containers, these functions do for a dataclass or a namespace as well,
which need not be registered with torch. Such objects are taken apart as a region does for its
replay: Note [Objects among the arguments] in regions/recompute/object_state.py. Of an object that
leads to very much else nothing is found, and it is not copied.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rekindle.regions.recompute.object_state import Layout, layout_of
from rekindle.regions.recompute.random_generators import PLAIN
from rekindle.torch_private.pytrees import tree_leaves, tree_map

_MOST = 2048
"""Objects that one may lead to."""
_DEEPEST = 64
"""How many objects may be inside one another."""


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested containers and objects.

    >>> import types, torch
    >>> tensors_in([types.SimpleNamespace(state={"x": torch.tensor(1)})])
    [tensor(1)]
    """
    return _Finder().found_in(values)


def tensors_in_objects(values: Any) -> list[Tensor]:
    """Return those tensors that objects hold, which torch's pytrees do not find."""
    return tensors_in([leaf for leaf in tree_leaves(values) if not isinstance(leaf, Tensor)])


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Return nested containers and objects of the same kinds, with a function of each tensor.

    The containers and objects are new ones, also those without tensors. A tensor or an object that
    is there twice is there twice in the result.
    """
    return _Copier(function).copy_of(values)


class _TooManyError(Exception):
    """An object leads to more than is looked at."""


class _Finder:
    """Finds tensors. It is no function that calls itself: that is a cycle, and holds tensors."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def found_in(self, values: Any) -> list[Tensor]:
        found: list[Tensor] = []
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif (layout := _layout_of(leaf)) is not None and id(leaf) not in self._seen:
                try:
                    found += self._found_in_object(leaf, layout, 0, _Limit())
                except _TooManyError:
                    continue
        return found

    def _found_in_object(
        self, value: Any, layout: Layout, depth: int, limit: "_Limit"
    ) -> list[Tensor]:
        limit.visit(depth)
        self._seen.add(id(value))
        found: list[Tensor] = []
        for leaf in tree_leaves((list(layout.attributes(value).values()), layout.items(value))):
            if isinstance(leaf, Tensor):
                found.append(leaf)
            elif (inner := _layout_of(leaf)) is not None and id(leaf) not in self._seen:
                found += self._found_in_object(leaf, inner, depth + 1, limit)
        return found


class _Copier:
    """Copies containers and objects."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function
        self._done: dict[int, tuple[Any, Any]] = {}
        """Tensors and objects with what they have become, by their ids."""
        self._depth = 0
        self._limit = _Limit()

    def copy_of(self, values: Any) -> Any:
        return tree_map(self._leaf, values)

    def _leaf(self, leaf: Any) -> Any:
        if id(leaf) in self._done:
            return self._done[id(leaf)][1]
        if isinstance(leaf, Tensor):
            made = self._function(leaf)
            self._done[id(leaf)] = leaf, made
            return made
        if type(leaf) is set:
            return {self._leaf(item) for item in leaf}
        layout = _layout_of(leaf)
        if layout is None:
            return leaf
        if self._depth:
            return self._object(leaf, layout)
        self._limit, count = _Limit(), len(self._done)
        try:
            return self._object(leaf, layout)
        except _TooManyError:
            self._depth = 0
            for key in list(self._done)[count:]:
                del self._done[key]
            return leaf

    def _object(self, value: Any, layout: Layout) -> Any:
        self._limit.visit(self._depth)
        kind = type(value)
        new = layout.blank(kind, layout.extra_of(value))
        self._done[id(value)] = value, new  # before its parts, which may lead back to it
        self._depth += 1
        attributes = {name: self.copy_of(v) for name, v in layout.attributes(value).items()}
        layout.fill(new, attributes, self.copy_of(layout.items(value)))
        self._depth -= 1
        return new


class _Limit:
    """Counts the objects that one leads to."""

    def __init__(self) -> None:
        self._visits = 0

    def visit(self, depth: int) -> None:
        """Count one more, inside of `depth` others."""
        self._visits += 1
        if self._visits > _MOST or depth > _DEEPEST:
            raise _TooManyError


def _layout_of(value: Any) -> Layout | None:
    kind = type(value)
    return None if kind in PLAIN else layout_of(kind)
