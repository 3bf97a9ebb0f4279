"""The random generators, besides the default ones, that a region may draw from.

Note [How generators are found]. Which generator an op draws from is known only when the op runs,
and looking at every op costs more than the rest of a region. So before the forward the engine
searches what the region's modules hold: attributes of the modules and of their classes, forward
hooks, globals that their methods name, and from there containers, plain objects, closures and
partials, however deep. Objects of torch's and of Python's own classes are not entered, containers
aside. What a module holds may change between two calls, so every call searches; most modules hold
numbers and strings alone, and then the search is over after one look at each.

A search that would visit too many objects gives up. Then, and only then, the forward runs under
`DrawWatch`, which sees every op and takes the state of a generator before its first draw.
"""

import functools
import gc
import os
import sys
import types
from collections.abc import Iterable, Iterator
from inspect import unwrap
from itertools import islice
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from rekindle.regions.recompute import rng_state as random_state
from rekindle.torch_private.dispatch_modes import TorchDispatchMode
from rekindle.torch_private.tensor_identity import generator_key

PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
)
"""Types whose values hold nothing and never change."""
ATOMS = PLAIN | {Tensor, nn.Parameter, types.ModuleType, types.BuiltinFunctionType}
"""Types whose values lead to no generator."""
_are_atoms = ATOMS.issuperset
_NEVER_ENTERED = (Tensor, type, types.ModuleType, types.CodeType, types.FrameType)
_ENTERED_LIBRARIES = frozenset(("builtins", "collections", "functools", "types", "argparse"))
"""Modules of Python's own whose objects are entered: containers, partials, namespaces."""
_HAS_REFERENCES = 1 << 14
"""`Py_TPFLAGS_HAVE_GC`: only objects of such types hold references to others."""
_LONG = 4096
"""A container with more entries than this is not searched."""
_VISITS, _VISITS_PER_MODULE = 64, 32
"""Objects that one search visits before it gives up: a fixed number, and more for each module."""


class HasRng(Protocol):
    """One call of a region, with the random state that its replay starts from."""

    rng: random_state.RngState | None


def search(holders: list[Any], modules: int, seen: set[int]) -> list[torch.Generator] | None:
    """Every generator that `holders` lead to; None if the search gave up.

    Takes the list apart. Objects with an id in `seen` are not visited, and those that are visited
    are added to it. Containers of numbers and strings alone, which most are, count for nothing.
    """
    found: list[torch.Generator] = []
    left = _VISITS + _VISITS_PER_MODULE * modules
    while holders:
        value = holders.pop()
        kind = type(value)
        if kind is dict:
            parts = value.values()
        elif kind is list or kind is tuple:
            parts = value
        else:
            parts = None
        if parts is not None and len(parts) <= _LONG and _are_atoms(map(type, parts)):
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if parts is None:
            if issubclass(kind, torch.Generator):
                found.append(value)
                continue
            if not _is_entered(value, kind):
                continue
            parts = parts_of(value)
        left -= 1
        if left < 0 or len(parts) > _LONG:
            return None
        holders += [part for part in parts if type(part) not in ATOMS]
    return found


def _is_entered(value: Any, kind: type) -> bool:
    """True if a search looks into a value."""
    # `issubclass`, since `isinstance` asks values for `__class__`, and some answer in Python
    if not kind.__flags__ & _HAS_REFERENCES or issubclass(kind, _NEVER_ENTERED):
        return False
    return not is_of_a_library(kind.__module__) or hasattr(value, "__wrapped__")


@functools.cache
def is_of_a_library(module: str) -> bool:
    """True if a module is torch's, Python's or ours: its objects hold no generator of a user's."""
    root = module.partition(".")[0]
    if module in _ENTERED_LIBRARIES:
        return False
    return root in ("torch", "rekindle") or _is_pythons_own(root)


def _is_pythons_own(root: str) -> bool:
    """True if a module is of Python's library, and not a user's file of the same name."""
    if root not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(root), "__file__", None)
    return file is None or os.path.dirname(os.path.dirname(os.__file__)) in file


def parts_of(value: Any) -> list[Any]:
    """The objects that a value leads to in one step."""
    kind = type(value)
    if kind is types.FunctionType:
        return parts_of_function(value)
    if issubclass(kind, nn.Module):
        parts = [*value._modules.values(), *class_parts((kind,))]
        add_parts(parts, value)
        return parts
    if is_of_a_library(kind.__module__):  # it stands for a function of the user's
        return [value.__wrapped__]
    return gc.get_referents(value)


def parts_of_function(function: types.FunctionType) -> list[Any]:
    """Values that a function closes over, its defaults, and the globals that it names.

    Globals of a library's function are left out: they are the library's.
    """
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
    if not is_of_a_library(bound.get("__name__") or ""):
        _add_globals(parts, function.__code__, bound)
    return parts


def _add_globals(parts: list[Any], code: types.CodeType, bound: dict[str, Any]) -> None:
    """Add the globals that code names, and functions inside it, where they may lead somewhere."""
    for name in code.co_names:
        if name in bound:
            part = bound[name]
            if type(part) not in ATOMS:
                parts.append(part)
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            _add_globals(parts, constant, bound)


_FIRST = tuple(vars(nn.Module()))
"""Names of the attributes that `nn.Module` sets, in order."""
_COUNT = len(_FIRST)
_LAST = _FIRST[-1]


def add_parts(parts: list[Any], module: nn.Module) -> None:
    """Add what a module itself holds that may lead to a generator."""
    own = module.__dict__
    if own["_forward_pre_hooks"] or own["_forward_hooks"]:
        parts += (own["_forward_pre_hooks"], own["_forward_hooks"])
    if len(own) <= _COUNT:
        return
    if next(islice(own, _COUNT - 1, None)) == _LAST:
        if _are_atoms(map(type, islice(own.values(), _COUNT, None))):
            return
        values = [*islice(own.values(), _COUNT, None)]
    else:  # it set something before `super().__init__()`
        values = [own.get(name) for name in own.keys() - frozenset(_FIRST)]
    parts += [value for value in values if type(value) not in ATOMS]


_Path = tuple[str, ...]
"""A name in a class; or a method's name, names of functions that call each other, and a global."""


class _ClassNotes:
    """Where to look for generators in a class: by name, because values may be exchanged."""

    __slots__ = ("attributes", "globals", "kind", "size")

    def __init__(self, kind: type) -> None:
        self.kind = ref(kind, functools.partial(_forget, id(kind)))
        self.size = len(vars(kind))
        self.attributes = tuple(_attributes(kind))
        self.globals = tuple(_methods_globals(kind))


_notes: dict[int, _ClassNotes] = {}
"""By the id of a class; notes go with the class."""


def _forget(key: int, _: Any) -> None:
    _notes.pop(key, None)


def class_parts(kinds: Iterable[type]) -> list[Any]:
    """Attributes of classes, and globals of their `forward`, that may lead to a generator."""
    parts: list[Any] = []
    for kind in kinds:
        notes = _notes.get(id(kind))
        if notes is None or notes.kind() is not kind or notes.size != len(kind.__dict__):
            notes = _notes[id(kind)] = _ClassNotes(kind)
        if notes.attributes or notes.globals:
            parts += [_static(kind, name) for name in notes.attributes]
            parts += [_at(kind, path) for path in notes.globals]
    return [part for part in parts if type(part) not in ATOMS]


def _static(kind: type, name: str) -> Any:
    """The value of a name in a class or its bases, without binding it."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _attributes(kind: type) -> Iterator[str]:
    """Names in a class and its bases that may lead to a generator, methods aside."""
    for base in kind.__mro__:
        if not is_of_a_library(base.__module__):
            for name, value in list(vars(base).items()):
                if not name.startswith("__") and _function_in(value) is None and _may_lead(value):
                    yield name


def _methods_globals(kind: type) -> Iterator[_Path]:
    """Paths to the globals that `forward` names, and the methods and functions that it calls."""
    methods = ["forward"]
    seen: set[int] = set()
    for method in methods:  # grows while it is walked
        function = _function_in(_static(kind, method))
        if function is None or is_of_a_library(function.__globals__.get("__name__") or ""):
            continue
        yield from _global_paths((method,), function, seen)
        for name in _names_in(function.__code__):
            if name not in methods and _function_in(_static(kind, name)) is not None:
                methods.append(name)


def _function_in(value: Any) -> types.FunctionType | None:
    """The user's function in a method, static method, class method or property."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    value = unwrap(value) if callable(value) else value
    return value if isinstance(value, types.FunctionType) else None


def _global_paths(path: _Path, function: types.FunctionType, seen: set[int]) -> Iterator[_Path]:
    """Paths to the globals that a function names, and the functions that it names in turn."""
    if id(function) in seen or is_of_a_library(function.__globals__.get("__name__") or ""):
        return
    seen.add(id(function))
    for name in _names_in(function.__code__):
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if isinstance(value, types.FunctionType):
            yield from _global_paths((*path, name), value, seen)
        elif _may_lead(value):
            yield (*path, name)


def _may_lead(value: Any) -> bool:
    """True if a name with this value may ever lead to a generator; None is filled in later."""
    if value is None or isinstance(value, torch.Generator):
        return True
    return type(value) not in ATOMS and _is_entered(value, type(value))


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _at(kind: type, path: _Path) -> Any:
    """The global at the end of a path now; None if the path has changed."""
    function = _function_in(_static(kind, path[0]))
    for name in path[1:-1]:
        if function is None:
            return None
        named = function.__globals__.get(name)
        function = named if isinstance(named, types.FunctionType) else None
    return None if function is None else function.__globals__.get(path[-1])


class DrawWatch(TorchDispatchMode):
    """Entered around a forward: takes each generator's state before an op first draws from it.

    Note [How generators are found].
    """

    supports_higher_order_operators = True

    def __init__(self, region: HasRng) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region
        self._known = {generator_key(torch.default_generator)}
        if region.rng is not None:
            self._known.update(generator_key(generator) for generator, _ in region.rng[1])

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, torch.Generator) and generator_key(value) not in self._known:
                self._known.add(generator_key(value))
                state = self._region.rng
                if state is not None:
                    drawn = (value, value.get_state())
                    self._region.rng = state[0], (*state[1], drawn)
        return func(*args, **(kwargs or {}))
