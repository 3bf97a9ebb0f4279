"""`Forward`: takes the place of a module's `forward` while the module runs by a strategy.

It is in the module's own `__dict__`, where `nn.Module` looks first: class, names, keys and hooks
are as before, and hooks run around it, once. A copy or a pickle of the module has one of its own.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import nn

from rekindle.compile.checkpoint_call import checkpoint
from rekindle.errors import RekindleError
from rekindle.modules.compiled_forward import CompiledForward
from rekindle.modules.heads import HeadEngine
from rekindle.modules.strategy_engines import offload_context, runnable_policy
from rekindle.modules.tiles import TileEngine
from rekindle.modules.unwrapping import places
from rekindle.offload.context import Offload as OffloadContext
from rekindle.offload.context import keep_on_device
from rekindle.offload.owners import OffloaderSet, run_for_owner
from rekindle.regions.base import run_under_hooks
from rekindle.regions.saved_indices import SavedIndicesEngine, recomputed_modules
from rekindle.regions.selective import graph_location
from rekindle.strategy import (
    Compiled,
    Keep,
    Offload,
    Recompute,
    RecomputeInTiles,
    Rows,
    SavedIndices,
    Selective,
    Strategy,
    Tile,
)
from rekindle.torch_private.dynamo_frames import (
    break_graph,
    called_outside_graphs,
    no_graph_begins,
)

_WHY_GRAPH_BREAKS = (
    "a module whose activations are offloaded begins a graph of its own: rekindle.offload works on "
    "what a graph saves. policies.offload(...) works inside a graph"
)
_REGIONS = Recompute, RecomputeInTiles, Selective
_OPTIONS = frozenset(inspect.signature(checkpoint).parameters)


class _NotScriptableError(RekindleError, AttributeError):
    """A module that runs by a strategy cannot be scripted.

    An `AttributeError` too, so that `hasattr` says that the attribute is missing.
    """


class Forward:
    """A module's forward, run by a strategy."""

    def __init__(
        self,
        module: nn.Module,
        strategy: Strategy | None,
        instance_forward: Callable[..., Any] | None = None,
        offloaders: OffloaderSet | None = None,
        is_part: bool = False,
    ) -> None:
        self._module = ref(module)  # weakly: a model should go without the garbage collector
        self.instance_forward = instance_forward
        """The forward in the module's `__dict__` before, which hides that of its class."""
        self.offloaders = OffloaderSet() if offloaders is None else offloaders
        """The offloaders of the model that the strategy was applied to."""
        graph_location.managed_forwards[id(module)] = self
        self.is_part = is_part
        """True if it runs by its strategy only where a region around it names the module."""
        self.is_on = True
        """Turned off by `remove`, also where somebody has wrapped it since."""
        self.run_by(strategy)
        functools.update_wrapper(self, self.__wrapped__, updated=())

    def run_by(self, strategy: Strategy | None) -> None:
        """Run the module by a strategy from its next call on; by none, as it is."""
        self.strategy = strategy
        self._budget: float | None = None
        if isinstance(strategy, Compiled):
            self._budget = strategy.budget
            strategy = None if strategy.inner == Keep() else strategy.inner
        self._inner = strategy
        """The strategy, inside of a compiled block's own."""
        self.policy = runnable_policy(strategy.policy) if isinstance(strategy, Selective) else None
        """The policy of a selective region."""
        self._offload: OffloadContext | None = None
        if isinstance(strategy, Offload):
            self._offload = offload_context(strategy, self.offloaders)
        self.engine: HeadEngine | TileEngine | None = None
        """Runs the module by rows or in tiles."""
        if isinstance(strategy, Rows):
            self.engine = HeadEngine(self.__self__, strategy)
        elif isinstance(strategy, Tile):
            self.engine = TileEngine(self.__self__, strategy)
        self._by_index = None
        self._part_ids: frozenset[int] | None = None  # a copy's modules may not be there yet
        if isinstance(strategy, SavedIndices):
            self._by_index = SavedIndicesEngine(strategy, self.offloaders)

    @property
    def offload_strategy(self) -> Offload | None:
        """The strategy of its offloader, if the whole module is offloaded."""
        return None if self._offload is None else self._offload.strategy

    @property
    def __self__(self) -> nn.Module:
        module = self._module()
        assert module is not None, "its module calls it"
        return module

    @property
    @no_graph_begins
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward as it was."""
        own = self.instance_forward
        return own if own is not None else _class_forward(self.__self__)

    @__wrapped__.setter
    def __wrapped__(self, _: Any) -> None:
        pass

    @property
    def __func__(self) -> Any:
        """A function to be wrapped and bound anew, as accelerate does; it runs this forward."""

        @functools.wraps(self)
        def forward(_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return forward

    @property
    def __code__(self) -> Any:
        wrapped = self.__wrapped__
        return getattr(wrapped, "__func__", wrapped).__code__

    @property
    def __globals__(self) -> Any:
        """Read by `torch.jit.script`, and by nobody else: a script would be without the region."""
        raise _NotScriptableError(
            f"{type(self.__self__).__name__} cannot be scripted while rekindle manages its "
            "activations: a scripted module would ignore the strategy. Call rekindle.remove(model) "
            "first."
        )

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        strategy = self._inner
        if torch.compiler.is_compiling():
            if self.is_on and self._budget is not None:
                return _run_by_own_graphs(self, args, kwargs)
            forward = self.instance_forward or _traceable(self.__self__)
            if _runs_as_it_is_in_graphs(strategy):
                return forward(*args, **kwargs)
            if self.is_on and strategy is not None and not isinstance(strategy, _REGIONS):
                break_graph(_WHY_GRAPH_BREAKS)
        else:
            forward = self.own_forward()
        if not self.is_on or strategy is None or (self.is_part and not self._is_named()):
            return forward(*args, **kwargs)
        if self.engine is not None:
            return self.engine.run(forward, args, kwargs)
        if self._by_index is not None and not torch.compiler.is_compiling():
            return self._by_index.run(forward, args, kwargs, self._parts())
        if not isinstance(strategy, _REGIONS):
            context = self._context(forward)
            if not torch.compiler.is_compiling():
                return run_under_hooks(context, forward, args, kwargs)
            with context:
                return forward(*args, **kwargs)
        if self.policy is not None and not torch.compiler.is_compiling():
            return run_for_owner(self.offloaders, self._run_as_region, (forward, args, kwargs), {})
        return self._run_as_region(forward, args, kwargs)

    def own_forward(self) -> Callable[..., Any]:
        """The forward as it was; of a compiled block, with graphs at the budget of its strategy."""
        own = self.__wrapped__
        if self._budget is None or not self.is_on or not isinstance(own, CompiledForward):
            return own
        return own.at_budget(self._budget) if torch.is_grad_enabled() else own

    def _parts(self) -> frozenset[int]:
        """Ids of the modules inside this one that its strategy recomputes."""
        if self._part_ids is None:
            parts = parts_of(self.__self__, self._inner)
            self._part_ids = frozenset(id(part) for part in parts.values())
        return self._part_ids

    def _is_named(self) -> bool:
        """True if the region that runs around the module names it; in a graph, it always does."""
        if torch.compiler.is_compiling():
            return True
        return id(self.__self__) in recomputed_modules.get()

    def _run_as_region(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward as a region."""
        options: dict[str, Any] = {"use_reentrant": False}  # Note [A function alone]
        if self.policy is not None:
            options["context_fn"] = self.policy
        if kwargs and any(name in _OPTIONS for name in kwargs):  # the module's own, not ours
            call = _with_keywords(forward, tuple(kwargs))
            return checkpoint(call, *kwargs.values(), *args, **options)
        return checkpoint(forward, *args, **options, **kwargs)

    def _context(self, forward: Callable[..., Any]) -> AbstractContextManager[Any]:
        """The saved-tensor hooks to enter around the forward."""
        if self._by_index is not None:  # in a graph, which breaks here
            return self._by_index.around(forward)
        return keep_on_device() if self._offload is None else self._offload

    def __reduce__(self) -> Any:
        given = self.__self__, self.strategy, self.instance_forward, self.offloaders, self.is_part
        return Forward, given

    def __deepcopy__(self, memo: dict[int, Any]) -> "Forward":
        module = copy.deepcopy(self.__self__, memo)
        held = copy.deepcopy((self.instance_forward, self.offloaders), memo)
        return Forward(module, self.strategy, *held, self.is_part)


@called_outside_graphs(
    "a block that a plan compiled by itself has graphs of its own. Call rekindle.remove(model) "
    "before torch.compile, or rekindle.fit after it"
)
def _run_by_own_graphs(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a forward by its own graphs, where another graph is made of its caller."""
    return forward(*args, **kwargs)


def _runs_as_it_is_in_graphs(strategy: Strategy | None) -> bool:
    """True if a module runs as it is in a graph: a compiler fuses what it would split up.

    What one op makes again from other saved tensors, a compiler finds by itself, and the modules
    inside that are recomputed are regions of their own.
    """
    if isinstance(strategy, SavedIndices):
        return not strategy.offloaded
    return isinstance(strategy, Rows | Tile)


@no_graph_begins
def _class_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module's class, bound to the module."""
    kind = type(module)
    for base in kind.__mro__:  # as inspect.getattr_static, in a tenth of the time
        if "forward" in base.__dict__:
            forward = base.__dict__["forward"]
            break
    else:
        raise AttributeError(f"{kind.__name__} has no forward")
    if isinstance(forward, FunctionType):
        return MethodType(forward, module)
    bound: Callable[..., Any] = forward.__get__(module, kind)
    return bound


def _traceable(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module's class, as a function that Dynamo can look into."""
    function = type(module).forward

    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    return forward


def _with_keywords(forward: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """A forward that takes some of its keyword arguments by position, before the others."""

    @functools.wraps(forward)
    def call(*values: Any) -> Any:
        keywords = dict(zip(names, values, strict=False))
        return forward(*values[len(names) :], **keywords)

    return call


def parts_of(module: nn.Module, strategy: Strategy | None) -> dict[str, nn.Module]:
    """The modules inside one that its strategy recomputes, or runs in tiles, by path."""
    if not isinstance(strategy, SavedIndices | RecomputeInTiles) or not strategy.modules:
        return {}
    where = places(module)
    for name in strategy.modules:
        if name not in where:
            raise ValueError(
                f"{type(module).__name__} has no module {name!r}, which its strategy names"
            )
    return {where[name]: module.get_submodule(where[name]) for name in strategy.modules}


def forward_of(module: nn.Module) -> Forward | None:
    """The `Forward` in the place of a module's forward; None if there is none."""
    found = vars(module).get("forward")
    return found if isinstance(found, Forward) else None


def install_forward(
    module: nn.Module,
    strategy: Strategy | None,
    offloaders: OffloaderSet,
    *,
    is_part: bool = False,
) -> None:
    """Put a `Forward` in the place of a module's forward."""
    before = vars(module).get("forward")
    vars(module)["forward"] = Forward(module, strategy, before, offloaders, is_part)


def uninstall_forward(module: nn.Module) -> None:
    """Undo `install_forward`; a `Forward` that somebody has wrapped since is turned off."""
    forward = forward_of(module)
    if forward is None:
        for wrapped in _wrapped_in(vars(module).get("forward")):
            wrapped.is_on = False
        return
    forward.is_on = False
    if forward.instance_forward is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = forward.instance_forward


@dataclass(frozen=True)
class ForwardInDict:
    """The forward in a module's `__dict__` at one time, so that it can be put back."""

    module: nn.Module
    forward: Any
    """The forward; None if there was none."""
    ours: tuple[tuple[Forward, bool], ...]
    """The `Forward`s that it is or wraps, and whether they were on."""

    def put_back(self) -> None:
        """Undo whatever `install_forward` and `uninstall_forward` did since."""
        now = forward_of(self.module)
        if now is not None and now is not self.forward:
            now.is_on = False
        vars(self.module).pop("forward", None)
        if self.forward is not None:
            vars(self.module)["forward"] = self.forward
        for forward, is_on in self.ours:
            forward.is_on = is_on
            graph_location.managed_forwards[id(self.module)] = forward


def snapshot_forward(module: nn.Module) -> ForwardInDict:
    """The forward in a module's `__dict__` now."""
    forward = vars(module).get("forward")
    ours = tuple((each, each.is_on) for each in _wrapped_in(forward))
    return ForwardInDict(module, forward, ours)


def _wrapped_in(function: Any) -> Iterator[Forward]:
    """The `Forward`s that a function is, or wraps."""
    seen: set[int] = set()
    stack = [function]
    while stack:
        held = stack.pop()
        if held is None or id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, Forward):
            yield held
        elif callable(held):
            cells = getattr(held, "__closure__", None) or ()
            stack += [cell.cell_contents for cell in cells]
            stack += [getattr(held, name, None) for name in ("__wrapped__", "func", "__func__")]
            stack += list(getattr(held, "args", ()))
