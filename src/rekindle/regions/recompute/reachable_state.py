"""Modules and random generators that a region can be seen to reach: a replay restores their state.

Followed are: modules and what is below them; bound methods; partials; closures, default arguments
and globals of functions; containers; and the attributes of plain objects, a few steps deep. A
module that is reached in no such way is run twice like any other code. What modules hold is
searched for generators, however deep: Note [How generators are found] in random_generators.py.
"""

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from rekindle.regions.recompute.random_generators import (
    ATOMS,
    add_parts,
    class_parts,
    parts_of_function,
    search,
)

_DEPTH = 6
"""How many steps to follow: decorators wrap functions a few times over."""
_LONG = 256
"""A longer container is data, not layers."""
_MANY = 10_000
"""More modules than this, and the walk looks for cycles."""


Reached: TypeAlias = tuple[list[nn.Module], list[torch.Generator], bool]
"""Modules, some maybe twice; generators; and whether everything that may lead to a generator was
looked at."""


def reached_from(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Reached:
    """Every module and random generator that a call can be seen to reach."""
    modules: list[nn.Module] = []
    generators: list[torch.Generator] = []
    found = modules, generators
    if isinstance(function, nn.Module):
        modules.append(function)
    elif type(function) is types.FunctionType:
        for part in parts_of_function(function):
            _follow(part, found, _DEPTH)
    else:
        _follow(function, found, _DEPTH)
    for value in args:
        if type(value) not in ATOMS:
            _follow(value, found, _DEPTH)
    for value in kwargs.values():
        if type(value) not in ATOMS:
            _follow(value, found, _DEPTH)
    if not modules:
        return modules, generators, True
    holders: list[Any] = []
    modules = _with_children(modules, holders)
    holders += class_parts(set(map(type, modules)))
    if not holders:
        return modules, generators, True
    held = search(holders, len(modules), set(map(id, modules)))
    return modules, generators + (held or []), held is not None


def _with_children(modules: list[nn.Module], holders: list[Any]) -> list[nn.Module]:
    """The modules and all that are below them; adds to `holders` what these hold."""
    for module in modules:  # grows while it is walked
        add_parts(holders, module)
        children = module._modules
        if children:
            modules.extend([child for child in children.values() if child is not None])
            if len(modules) > _MANY:  # also what a module that holds itself comes to
                holders.clear()
                found = list({below: None for top in modules for below in top.modules()})
                for each in found:
                    add_parts(holders, each)
                return found
    return modules


def generators_of(model: nn.Module) -> list[torch.Generator]:
    """The random generators that a model holds, each once."""
    found = reached_from(model, (), {})[1]
    return list({id(generator): generator for generator in found}.values())


def _follow(value: Any, found: tuple[list[nn.Module], list[torch.Generator]], depth: int) -> None:
    kind = type(value)
    if kind in ATOMS or isinstance(value, Tensor | type):
        return
    if isinstance(value, nn.Module):
        found[0].append(value)
    elif isinstance(value, torch.Generator):
        found[1].append(value)
    elif depth > 0:
        for part in _parts(value):
            _follow(part, found, depth - 1)


def _parts(value: Any) -> Iterable[Any]:
    """The objects that a value leads to in one step."""
    if isinstance(value, types.FunctionType):
        return parts_of_function(value)
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return tuple(value) if len(value) <= _LONG else ()
    if isinstance(value, dict):
        return tuple(value.values()) if len(value) <= _LONG else ()
    if (owner := getattr(value, "__self__", None)) is not None:
        return (owner,)
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    return tuple(attributes.values()) if len(attributes) <= _LONG else ()
