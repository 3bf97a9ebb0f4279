"""A region by what autograd saves: no op is looked at, so that the host has next to nothing to do.

What is saved stays, but for what goes to host memory or disk, and for what one op gives back from
others that are saved anyway. Numbers count what autograd saves in the region. If a forward goes
another way than the one they were found in, other tensors go or stay, and gradients are the same.
"""

import warnings
from _thread import RLock
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rekindle import observation
from rekindle.offload.activation import Kept, Saved, bytes_of, changed_in_place, unpack
from rekindle.offload.context import kept
from rekindle.offload.derive import Derivation, derivation_of
from rekindle.offload.offload_options import FATE_OF_TIER, TierName
from rekindle.regions.backward_cleanup import empty_when_backward_ends
from rekindle.regions.selective.decisions import AS_PLANNED
from rekindle.regions.selective.offload_bridge import hooks_of, pause
from rekindle.regions.selective.op_addresses import block_of
from rekindle.regions.switches import recomputing
from rekindle.torch_private.autograd_graph import graph_task_id
from rekindle.torch_private.cuda import capturing
from rekindle.torch_private.dispatch_modes import dispatch_modes, entered_modes, is_traced
from rekindle.torch_private.dynamo_frames import not_compiled
from rekindle.torch_private.fake_mode import FakeTensor
from rekindle.torch_private.func_transforms import func_transform
from rekindle.torch_private.saved_tensor_hooks import pop_hooks, push_hooks
from rekindle.torch_private.storages import storage_key
from rekindle.torch_private.version_counters import VersionMark, version_of, versions_of


@dataclass(frozen=True)
class Saves:
    """What becomes of what autograd saves in a region, by number; the rest stays."""

    derived: frozenset[int]
    """Made again by one op, where one does."""
    offloaded: frozenset[int]
    tier: TierName = "host"
    """Where those go."""
    count: int = 0
    """How many tensors the region saved when the numbers were found; 0 if that is not known."""

    def around(
        self, function: Callable[..., Any], trusted: dict[int, bool]
    ) -> AbstractContextManager[Any]:
        """To be entered around the region's forward.

        `trusted` is the function's own: whether what is made again was seen to have the same bits,
        by number. It is looked at once.
        """
        if func_transform() is not None:  # autograd forbids hooks there
            return nullcontext()
        # What a replay saves, or a captured graph, is used at once or in place.
        if recomputing.get() or capturing():
            return kept()
        return _Region(self, function, trusted)

    def __repr__(self) -> str:
        parts = [("recompute", self.derived), (FATE_OF_TIER[self.tier], self.offloaded)]
        told = [f"{word} saves {sorted(numbers)}" for word, numbers in parts if numbers]
        return f"<{', '.join([*told, 'keep the rest'])}>"


def derivable(forward: Callable[[], Any], count: int) -> tuple[int, ...]:
    """The numbers of what one op gives back, in a forward that saves so many tensors."""
    region = _Region(Saves(frozenset(range(count)), frozenset()), forward, {})
    with region:
        out = forward()
    del out
    return tuple(region.derived)


class _Region:
    """One forward of a region."""

    def __init__(
        self, saves: Saves, function: Callable[..., Any], trusted: dict[int, bool]
    ) -> None:
        self._saves = saves
        self._trusted = trusted
        self._block = block_of(function) if saves.count else None
        self._decision = AS_PLANNED[saves.tier]
        self._send = hooks_of(self._decision)[0]
        self._number = -1
        self._dropped: WeakValueDictionary[int, _Dropped] = WeakValueDictionary()
        """By storage: several nodes may save one result."""
        self.derived: list[int] = []
        self._watch: observation.Watch | None = None
        if observation.active:
            self._watch = observation.Watch(function)
            self._watch.ran(())

    def __enter__(self) -> None:
        push_hooks(self._pack, unpack)

    def __exit__(self, *error: object) -> None:
        pop_hooks()
        if self._saves.offloaded:
            pause([self._decision], failed=error[0] is not None)
        if self._block is not None and error[0] is None:
            self._check_count(self._block)

    def _check_count(self, block: nn.Module) -> None:
        """Say so, once, if the region saves more or fewer tensors than it was planned for."""
        found, planned = self._number + 1, self._saves.count
        if found == planned or not (block.training and torch.is_grad_enabled()):
            return
        if self._trusted.setdefault(_TOLD, False):
            return
        self._trusted[_TOLD] = True
        warnings.warn(
            f"The plan no longer matches a {type(block).__name__}: when it was made, autograd "
            f"saved {planned} tensors there, and now {found}. Gradients are right; memory and time "
            "may differ from the plan. Fit the model again.",
            stacklevel=2,
        )

    @not_compiled
    def _pack(self, x: Tensor) -> Any:
        """What autograd gets in place of a tensor that it saves."""
        if is_traced():  # what an op that makes a graph saves is no activation
            return Kept(x)
        self._number += 1
        if self._number in self._saves.offloaded:
            return self._send(x)
        if self._number in self._saves.derived:
            dropped = self._derivation(x)
            if dropped is not None:
                self.derived.append(self._number)
                if self._watch is not None:
                    self._watch.saved(x)
                return _DroppedPart(dropped, x)
        return Kept(x)

    def _derivation(self, x: Tensor) -> "_Dropped | None":
        """How a tensor is made again; None if it is not, or has other bits then."""
        if not _can_be_shown(x) or _foreign_mode():
            return None
        storage = x.untyped_storage()
        key = storage_key(storage)
        known = self._dropped.get(key)
        if known is not None and known.mark.is_of(x):
            return known if known.derivation.dtype == x.dtype else None
        derivation = derivation_of(x, storage, _may_give)
        if derivation is None or derivation.dtype != x.dtype or not self._is_trusted(derivation, x):
            return None
        dropped = self._dropped[key] = _Dropped(derivation, x, self._watch)
        return dropped

    def _is_trusted(self, derivation: Derivation, x: Tensor) -> bool:
        """Whether the bits are the same: Note [When a node tells the whole truth]."""
        if isinstance(x, FakeTensor):
            return True
        if self._number not in self._trusted:
            data = bytes_of(x.untyped_storage(), x.device)
            self._trusted[self._number] = derivation.gives(data)
        return self._trusted[self._number]


def _can_be_shown(x: Tensor) -> bool:
    """Whether a tensor is given by its storage, shape and strides."""
    if type(x) not in (Tensor, FakeTensor) or x.is_nested or x.layout is not torch.strided:
        return False
    return not (x.is_conj() or x.is_neg())


def _foreign_mode() -> bool:
    """Whether a dispatch mode of somebody else is on: it may have ops do something else."""
    ours = "rekindle.", "torch._subclasses."  # the latter: fake tensors, to profile with
    return dispatch_modes() > 0 and any(
        not type(mode).__module__.startswith(ours) for mode in entered_modes()
    )


_TOLD = -1
"""In place of a number: whether it was said that the plan no longer matches."""
_CURE = "change it after the backward, or rekindle.remove() what the model runs by."


def _may_give(source: Any) -> bool:
    return isinstance(source, Saved | Kept | _DroppedPart)


class _Dropped:
    """A result that is not held: one op makes it again when backward wants it."""

    __slots__ = ("__weakref__", "_lock", "_now", "_storage", "_watch", "derivation", "mark")

    def __init__(self, derivation: Derivation, x: Tensor, watch: observation.Watch | None) -> None:
        self.derivation = derivation
        self.mark = VersionMark(x)
        self._storage = StorageWeakRef(x.untyped_storage())  # so that its key stays its own
        self._now: Tensor | None = None
        """The result while backward has use for it."""
        self._watch = watch
        self._lock = RLock()

    def get(self) -> Tensor:
        with self._lock:
            if self._now is not None:
                return self._now
            made = self.derivation.make(_CURE)
            if self._watch is not None:
                self._watch.replayed(1, again=False)
            if graph_task_id() != -1:
                self._now = made
                empty_when_backward_ends(self)
            return made

    def empty(self) -> None:
        """Let go of the result: it can be made once more."""
        self._now = None


class _DroppedPart:
    """A saved tensor that is, or shows, a result that is made again."""

    __slots__ = ("_counter", "_dropped", "_offset", "_shape", "_stride", "nbytes", "version")

    def __init__(self, dropped: _Dropped, x: Tensor) -> None:
        self._dropped = dropped
        self._shape, self._stride, self._offset = x.shape, x.stride(), x.storage_offset()
        self.nbytes = x.numel() * x.element_size()
        self.version = version_of(x)
        self._counter = None if isinstance(x, FakeTensor) else versions_of(x)

    @property
    def depth(self) -> int:
        """How many ops it takes to make it."""
        return self._dropped.derivation.depth

    def is_unchanged(self) -> bool:
        return self._counter is None or self._counter._version == self.version

    def get(self) -> Tensor:
        """The tensor as it was."""
        if not self.is_unchanged():
            assert self._counter is not None, "else nobody would know"
            dtype, found = self._dropped.derivation.dtype, self._counter._version
            raise changed_in_place(self._shape, dtype, self.version, found)
        return self._shown(self._dropped.get())

    def at_hand(self) -> Tensor | None:
        """The tensor, if that takes no waiting."""
        made = self._dropped.derivation.at_hand()
        return None if made is None else self._shown(made)

    def _shown(self, made: Tensor) -> Tensor:
        shown = made.detach().as_strided(self._shape, self._stride, self._offset)
        if self._counter is None:
            return shown
        same = self._counter.detach()  # whoever changes what is given out is noticed as well
        same.data = shown
        return same
