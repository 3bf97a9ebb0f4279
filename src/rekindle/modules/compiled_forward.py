"""`CompiledForward`: a module's forward, compiled alone, with graphs at a memory budget or without.

It takes the place of the module's forward while a plan for compiled blocks is measured, or applied:
then hooks of the module run outside of the graphs, and strategies around them. What is compiled is
shared: by all modules of a class whose graphs are alike, and by all plans.

Note [One artefact for a kind and a budget]. Dynamo finds compiled code by the code object that
runs, and tries few entries. Each budget has a backend of its own, so all budgets of one forward
would be entries of one code object, beside the user's own. So each budget of a class runs its
forward by a copy of `_run`, whose code object is its own. Modules of the class share its entries,
as far as their guards hold.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from rekindle.torch_private.compiled_functions import CompileOptions
from rekindle.torch_private.dynamo_frames import no_graph_begins
from rekindle.torch_private.memory_budgets import memory_budget
from rekindle.torch_private.partitioned_graphs import pass_over_graph_pairs, saved_names


class CompiledForward:
    """A module's forward, compiled by options that a user gave."""

    def __init__(
        self,
        module: nn.Module,
        options: CompileOptions | None,
        own: Callable[..., Any] | None = None,
        budget: float | None = None,
    ) -> None:
        self._module = ref(module)  # weakly: a model should go without the garbage collector
        self.options = options
        """The options that it is compiled by; None after it was pickled: then it is not."""
        self.own = own
        """The forward in the module's `__dict__` before, which hides that of its class."""
        self.budget = budget
        """The budget of its graphs; None for what the user's options say."""
        self._artefact: _Artefact | None = None
        self._at_budgets: dict[float, CompiledForward] = {}

    @property
    def __self__(self) -> nn.Module:
        module = self._module()
        assert module is not None, "its module calls it"
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward as it is without `torch.compile`."""
        return self.own or MethodType(type(self.__self__).forward, self.__self__)

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function that is compiled."""
        own = self.own
        return type(self.__self__).forward if own is None else getattr(own, "__func__", own)

    @property
    def _shared_by(self) -> type[nn.Module] | nn.Module:
        """The class, all modules of which run this function; else the module alone."""
        is_method = self.own is None or hasattr(self.own, "__func__")
        return type(self.__self__) if is_method else self.__self__

    @no_graph_begins
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.options is None or torch.compiler.is_compiling():  # or part of another graph
            return self.__wrapped__(*args, **kwargs)
        if self._artefact is None:
            self._artefact = _artefact(self._shared_by, self.__func__, self.options, self.budget)
        bound = self if self.own is None else self.own
        if hasattr(bound, "__self__"):
            args = (bound.__self__, *args)
        return self._artefact.compiled(self.__func__, args, kwargs)

    def names_of_saved(self, shapes: Sequence[tuple[int, ...]]) -> list[str]:
        """Names of the ops that make what a graph of this forward saves, by the shapes of it.

        None of a graph that is not known, such as one that was read from a cache.
        """
        known = [] if self._artefact is None else self._artefact.backend.saved
        for saved in known:
            if len(saved) == len(shapes) and all(
                map(_can_be, shapes, (shape for _, shape in saved))
            ):
                return [name for name, _ in saved]
        return []

    def at_budget(self, budget: float) -> "CompiledForward":
        """Return the forward with its graphs at a budget."""
        if budget not in self._at_budgets:
            there = CompiledForward(self.__self__, self.options, self.own, budget)
            self._at_budgets[budget] = there
        return self._at_budgets[budget]

    def __reduce__(self) -> Any:
        # As with torch, whose modules forget that they are compiled when they are pickled.
        return CompiledForward, (self.__self__, None, self.own, self.budget)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledForward":
        module, own = copy.deepcopy((self.__self__, self.own), memo)
        return CompiledForward(module, self.options, own, self.budget)


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _can_be(shape: tuple[int, ...], known: tuple[int, ...]) -> bool:
    """True if a tensor in a graph, of sizes that may be open (-1), can have a shape."""
    return len(shape) == len(known) and all(
        size in (-1, own) for own, size in zip(shape, known, strict=True)
    )


SavedNames = tuple[tuple[str, tuple[int, ...]], ...]
"""Names of the ops that make what one graph saves, with shapes; in order."""


@dataclass(eq=False)
class _Backend:
    """A backend whose graphs are at a budget, or as a user's backend makes them."""

    backend: Any
    budget: float | None
    saved: list[SavedNames] = field(default_factory=list)
    """Names of what its graphs save, for those that were made here, not read from a cache."""

    def __post_init__(self) -> None:
        self.compiler_name = getattr(self.backend, "compiler_name", str(self.backend))
        self.__name__ = self.compiler_name
        for name in ("backend_ctx_ctor", "get_compiler_config", "reset"):  # which torch looks for
            if hasattr(self.backend, name):
                setattr(self, name, getattr(self.backend, name))

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        budget = nullcontext() if self.budget is None else memory_budget(self.budget)
        with budget, pass_over_graph_pairs(self._note):
            return self.backend(graph, inputs, **options)

    def _note(self, forward: Any, _backward: Any, outputs: int) -> None:
        self.saved.append(saved_names(forward, outputs))


@dataclass(frozen=True, eq=False)
class _Artefact:
    function: Callable[..., Any]
    options: CompileOptions
    backend: _Backend
    compiled: Callable[..., Any]


_artefacts: "WeakKeyDictionary[type[nn.Module] | nn.Module, list[_Artefact]]" = WeakKeyDictionary()
"""Compiled forwards by class of module: plans come and go, and models of a class share them. Those
of a module with a function of its own are by the module."""


def _artefact(
    owner: type[nn.Module] | nn.Module,
    function: Callable[..., Any],
    options: CompileOptions,
    budget: float | None,
) -> _Artefact:
    """The artefact that runs a forward at a budget: Note [One artefact for a kind and a budget]."""
    known = _artefacts.setdefault(owner, [])
    for each in known:
        same = each.function is function and each.backend.budget == budget
        if same and each.options == options:
            return each
    kind = owner if isinstance(owner, type) else type(owner)
    code = _run.__code__.replace(co_name=f"{kind.__name__}_forward")
    # With the forward's own globals: those of another module Dynamo looks up by its name.
    own = FunctionType(code, getattr(function, "__globals__", globals()))
    backend = _Backend(options.backend, budget)
    known.append(_Artefact(function, options, backend, options.compile(own, backend)))
    return known[-1]
