"""Which modules a region can be seen to reach, so that a replay can take care of their state.

Followed are: modules and what is below them; bound methods; partials; closures, default arguments
and globals of functions; containers; and the attributes of plain objects, a few steps deep. A
module that is reached in no such way is run twice like any other code.
"""

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 6
_LONG = 256  # a longer container is data, not layers
_MANY = 10_000
_ATOMS = frozenset(
    [
        *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size),
        *(Tensor, nn.Parameter, torch.Generator, types.ModuleType, types.BuiltinFunctionType),
    ]
)


def reached_from(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[nn.Module]:
    """Every module that a call can be seen to reach; one that is shared may be there twice."""
    roots: list[nn.Module] = []
    if isinstance(function, nn.Module):
        roots.append(function)
    elif type(function) is types.FunctionType:
        for part in _parts_of_function(function):
            _follow(part, roots, _DEPTH)
    else:
        _follow(function, roots, _DEPTH)
    for value in args:
        if type(value) not in _ATOMS:
            _follow(value, roots, _DEPTH)
    for value in kwargs.values():
        if type(value) not in _ATOMS:
            _follow(value, roots, _DEPTH)
    for module in roots:  # grows while it is walked
        children = module._modules
        if children:
            roots.extend([child for child in children.values() if child is not None])
            if len(roots) > _MANY:  # also what a module that holds itself comes to
                return list({child: None for root in roots for child in root.modules()})
    return roots


def _follow(value: Any, roots: list[nn.Module], depth: int) -> None:
    kind = type(value)
    if kind in _ATOMS or isinstance(value, Tensor | type):
        return
    if isinstance(value, nn.Module):
        roots.append(value)
    elif depth > 0:
        for part in _parts(value):
            _follow(part, roots, depth - 1)


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
