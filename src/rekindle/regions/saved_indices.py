"""Regions by `strategy.SavedIndices`: saved tensors stay, but for those at some indices.

Tensors at the indices `offloaded` are copied to host memory or disk; each of those at `recomputed`
is made again by one op, from tensors that are saved anyway. No op of the forward is looked at, so
that the host has next to nothing to do. An index counts the tensors that autograd saves in the
region. If a forward takes another way than the one in which the indices were found, other tensors
are moved or made again, and gradients are the same.
"""

import sys
import warnings
from _thread import RLock
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rekindle import observation
from rekindle.offload.activation import as_bytes
from rekindle.offload.context import keep_on_device
from rekindle.offload.derive import Derivation, derivation_of
from rekindle.offload.owners import OffloaderSet
from rekindle.offload.saved_tensors import KeptTensor, OffloadedTensor, unpack, written_since_saved
from rekindle.regions.backward_cleanup import empty_when_backward_ends
from rekindle.regions.base import Region, is_replaying, run_under_hooks
from rekindle.regions.recompute.containers import packs_arguments
from rekindle.regions.selective.decisions import AS_PLANNED
from rekindle.regions.selective.offload_bridge import offloader_of
from rekindle.regions.selective.op_addresses import block_of
from rekindle.strategy import SavedIndices
from rekindle.torch_private.autograd_graph import graph_task_id
from rekindle.torch_private.cuda import is_capturing
from rekindle.torch_private.dispatch_modes import dispatch_modes, entered_modes, is_traced
from rekindle.torch_private.dynamo_frames import not_compiled
from rekindle.torch_private.fake_mode import FakeTensor
from rekindle.torch_private.func_transforms import func_transform
from rekindle.torch_private.storages import storage_key
from rekindle.torch_private.version_counters import VersionMark, version_alias, version_of

recomputed_modules: ContextVar[frozenset[int]] = ContextVar(
    "rekindle_recomputed_modules", default=frozenset()
)
"""Ids of the modules that the region which runs on this thread recomputes inside of it.

Modules are asked in their calls, not given a strategy of their own: a region that was run by other
strategies, and is replayed after the model was planned again, finds them as they were.
"""


class SavedIndicesEngine:
    """Runs the forwards of one function by a `strategy.SavedIndices`."""

    def __init__(self, strategy: SavedIndices, owner: OffloaderSet | None = None) -> None:
        self.strategy = strategy
        self.owner = owner
        """Has the offloader; without one, the owner of what runs does."""
        self.recomputed = frozenset(strategy.recomputed)
        self.offloaded = frozenset(strategy.offloaded)
        self.bits_match: dict[int, bool] = {}
        """By index: True if a recomputed tensor had the bits of the forward, which is seen once."""
        self.warned_of_count = False

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        modules: frozenset[int] = frozenset(),
    ) -> Any:
        """Run one forward, in which some modules are recomputed: those with these ids."""
        if not modules:
            return run_under_hooks(self.around(function), function, args, kwargs)
        outer = recomputed_modules.get()
        try:
            if not (self.recomputed or self.offloaded):  # no saved tensor has to be looked at
                recomputed_modules.set(modules)
                return function(*args, **kwargs)
            context = self.around(function)
            is_region = isinstance(context, SavedIndicesRegion)
            recomputed_modules.set(modules if is_region else frozenset())
            return run_under_hooks(context, function, args, kwargs)
        finally:
            recomputed_modules.set(outer)

    def around(self, function: Callable[..., Any]) -> AbstractContextManager[Any]:
        """A context to enter around one forward."""
        if func_transform() is not None:  # autograd forbids hooks there
            return nullcontext()
        # What a replay saves, or a captured graph, is used at once or in place.
        if is_replaying() or is_capturing():
            return keep_on_device()
        return SavedIndicesRegion(self, function)


def recomputable_indices(forward: Callable[[], Any], count: int) -> tuple[int, ...]:
    """Indices of saved tensors that one op makes again, seen in a run of `forward`.

    `count` is the number of tensors that autograd saves in it.
    """
    region = SavedIndicesRegion(SavedIndicesEngine(SavedIndices(tuple(range(count)))), forward)
    with region:
        out = forward()
    del out
    return tuple(region.recomputed)


class SavedIndicesRegion(Region):
    """One forward of a region, and what autograd saved in it."""

    unpack = staticmethod(unpack)

    def __init__(self, engine: SavedIndicesEngine, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._engine = engine
        self._block = block_of(function) if engine.strategy.count else None
        self._offloader = None
        if engine.offloaded:
            self._offloader = offloader_of(AS_PLANNED[engine.strategy.tier], engine.owner)
        self._dropped: WeakValueDictionary[int, _DroppedResult] = WeakValueDictionary()
        """Results that are not held, by storage: several nodes may save one result."""
        self.saved = 0
        """Number of tensors that autograd has saved in the region."""
        self.recomputed: list[int] = []
        """Indices of saved tensors that were dropped."""
        if observation.active:
            self.count_forward()

    def end_forward(self, failed: bool) -> None:
        """Have the copies out of the region's tensors begun, and check how many were saved."""
        if self._offloader is not None:
            self._offloader.pause(failed)
        if self._block is not None and not failed:
            self._check_count(self._block)

    def _check_count(self, block: nn.Module) -> None:
        """Warn, once, if the region saves more or fewer tensors than it was planned for."""
        engine, found = self._engine, self.saved
        planned = engine.strategy.count
        if found == planned or not (block.training and torch.is_grad_enabled()):
            return
        if engine.warned_of_count:
            return
        engine.warned_of_count = True
        warnings.warn(
            f"The plan no longer matches a {type(block).__name__}: when it was made, autograd "
            f"saved {planned} tensors there, and now {found}. Gradients are right; memory and time "
            "may differ from the plan. Fit the model again.",
            stacklevel=2,
        )

    @not_compiled
    def pack(self, x: Tensor) -> Any:
        """Saved-tensor hook: the tensor, or what brings or makes it back."""
        if is_traced():  # what an op that makes a graph saves is no activation
            return KeptTensor(x)
        if self._engine.strategy.modules and packs_arguments(sys._getframe(1)):
            return KeptTensor(x)  # what a recomputed module is given has no index
        index = self.saved
        self.saved = index + 1
        if index in self._engine.offloaded:
            assert self._offloader is not None, "it is there if anything is offloaded"
            return self._offloader.pack(x)
        if index in self._engine.recomputed:
            dropped = self._drop(x, index)
            if dropped is not None:
                self.recomputed.append(index)
                if self.watch is not None:
                    self.watch.saved(x)
                return _DroppedTensor(dropped, x)
        return KeptTensor(x)

    def _drop(self, x: Tensor, index: int) -> "_DroppedResult | None":
        """The result that a tensor is or shows, to be made again; None if that is not possible."""
        if not _is_strided_memory(x) or _foreign_mode():
            return None
        storage = x.untyped_storage()
        key = storage_key(storage)
        known = self._dropped.get(key)
        if known is not None and known.mark.is_of(x):
            return known if known.derivation.dtype == x.dtype else None
        derivation = derivation_of(x, storage, _can_be_a_source)
        if derivation is None or derivation.dtype != x.dtype:
            return None
        if not self._gives(derivation, x, index):
            return None
        dropped = self._dropped[key] = _DroppedResult(derivation, x, self.watch)
        return dropped

    def _gives(self, derivation: Derivation, x: Tensor, index: int) -> bool:
        """True if the result has the same bits: Note [When a node can be trusted]."""
        if isinstance(x, FakeTensor):
            return True
        bits_match = self._engine.bits_match
        if index not in bits_match:
            bits_match[index] = derivation.gives(as_bytes(x.untyped_storage(), x.device))
        return bits_match[index]


def _is_strided_memory(x: Tensor) -> bool:
    """True if storage, shape, strides and offset are all there is to a tensor."""
    if type(x) not in (Tensor, FakeTensor) or x.is_nested or x.layout is not torch.strided:
        return False
    return not (x.is_conj() or x.is_neg())


def _foreign_mode() -> bool:
    """True if a dispatch mode of somebody else is on: it may have ops do something else."""
    ours = "rekindle.", FakeTensor.__module__  # the latter: fake tensors, to profile with
    return dispatch_modes() > 0 and any(
        not type(mode).__module__.startswith(ours) for mode in entered_modes()
    )


_CURE = "change it after the backward, or rekindle.remove() what the model runs by."


def _can_be_a_source(source: Any) -> bool:
    """True if what was packed for a saved tensor can be had again to make others from it."""
    return isinstance(source, OffloadedTensor | KeptTensor | _DroppedTensor)


class _DroppedResult:
    """A result that is not held: one op makes it again when backward asks for it."""

    __slots__ = ("__weakref__", "_lock", "_remade", "_storage", "_watch", "derivation", "mark")

    def __init__(self, derivation: Derivation, x: Tensor, watch: observation.Watch | None) -> None:
        self.derivation = derivation
        self.mark = VersionMark(x)
        self._storage = StorageWeakRef(x.untyped_storage())  # so that its key stays its own
        self._remade: Tensor | None = None
        """The result while backward uses it."""
        self._watch = watch
        self._lock = RLock()

    def get(self) -> Tensor:
        with self._lock:
            if self._remade is not None:
                return self._remade
            made = self.derivation.make(_CURE)
            if self._watch is not None:
                self._watch.replayed(1, again=False)
            if graph_task_id() != -1:
                self._remade = made
                empty_when_backward_ends(self)
            return made

    def empty(self) -> None:
        """Let go of the result, which can be made once more."""
        self._remade = None


class _DroppedTensor:
    """A saved tensor that is, or is a view of, a result that is made again."""

    __slots__ = ("_counter", "_dropped", "_offset", "_shape", "_stride", "nbytes", "version")

    def __init__(self, dropped: _DroppedResult, x: Tensor) -> None:
        self._dropped = dropped
        self._shape, self._stride, self._offset = x.shape, x.stride(), x.storage_offset()
        self.nbytes = x.numel() * x.element_size()
        self.version = version_of(x)
        self._counter = None if isinstance(x, FakeTensor) else version_alias(x)

    @property
    def depth(self) -> int:
        """Number of ops that it takes to make the tensor."""
        return self._dropped.derivation.depth

    def is_unchanged(self) -> bool:
        return self._counter is None or self._counter._version == self.version

    def get(self) -> Tensor:
        """The tensor as it was."""
        if not self.is_unchanged():
            assert self._counter is not None, "else nobody would know"
            dtype, found = self._dropped.derivation.dtype, self._counter._version
            raise written_since_saved(self._shape, dtype, self.version, found)
        return self._view_of(self._dropped.get())

    def without_waiting(self) -> Tensor | None:
        """The tensor, if what it is made from is at hand."""
        made = self._dropped.derivation.without_waiting()
        return None if made is None else self._view_of(made)

    def _view_of(self, made: Tensor) -> Tensor:
        shown = made.detach().as_strided(self._shape, self._stride, self._offset)
        if self._counter is None:
            return shown
        same = self._counter.detach()  # whoever changes what is given out is noticed as well
        same.data = shown
        return same
