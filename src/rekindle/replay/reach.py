"""Which modules and random generators a region can be seen to reach: a replay restores their state.

Followed are: modules and what is below them; bound methods; partials; closures, default arguments
and globals of functions; containers; and the attributes of plain objects, a few steps deep. A
module that is reached in no such way is run twice like any other code.
"""

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

_Found: TypeAlias = tuple[list[nn.Module], list[torch.Generator]]
_DEPTH = 6
"""How many steps to follow: decorators wrap functions a few times over."""
_LONG = 256
"""A longer container is data, not layers."""
_MANY = 10_000
"""More modules than this, and the walk looks for cycles."""
PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
)
"""Types whose values hold nothing and never change."""
_ATOMS = PLAIN | {Tensor, nn.Parameter, types.ModuleType, types.BuiltinFunctionType}


def reached_from(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Found:
    """Every module and random generator that a call can be seen to reach; some maybe twice."""
    found: _Found = ([], [])
    modules = found[0]
    if isinstance(function, nn.Module):
        modules.append(function)
    elif type(function) is types.FunctionType:
        for part in _parts_of_function(function):
            _follow(part, found, _DEPTH)
    else:
        _follow(function, found, _DEPTH)
    for value in args:
        if type(value) not in _ATOMS:
            _follow(value, found, _DEPTH)
    for value in kwargs.values():
        if type(value) not in _ATOMS:
            _follow(value, found, _DEPTH)
    for module in modules:  # grows while it is walked
        children = module._modules
        if children:
            modules.extend([child for child in children.values() if child is not None])
            if len(modules) > _MANY:  # also what a module that holds itself comes to
                return list({below: None for top in modules for below in top.modules()}), found[1]
    return found


def _follow(value: Any, found: _Found, depth: int) -> None:
    kind = type(value)
    if kind in _ATOMS or isinstance(value, Tensor | type):
        return
    if isinstance(value, nn.Module):
        found[0].append(value)
    elif kind is torch.Generator:
        found[1].append(value)
    elif depth > 0:
        for part in _parts(value):
            _follow(part, found, depth - 1)


def _parts(value: Any) -> Iterable[Any]:
    """What a value leads to in one step."""
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
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


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    parts: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # a variable that is not assigned yet
            continue
    if function.__defaults__:
        parts += function.__defaults__
    if function.__kwdefaults__:
        parts += function.__kwdefaults__.values()
    bound = function.__globals__
    for name in function.__code__.co_names:
        if name in bound and type(bound[name]) not in _ATOMS:
            parts.append(bound[name])
    return parts
