"""Records a training step storage by storage: who made it, when, for whom, and when it was freed.

Bytes are counted by the planner's meter for CPUs, `LiveBytes`; the recorder adds the place of the
op. It holds no tensor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from rekindle.explanation.sites import OpSite, SiteFinder
from rekindle.offload.saved_tensors import KeptTensor, unpack
from rekindle.planner.instruments.memory_meter import LiveBytes, storages_of
from rekindle.planner.placement import is_on
from rekindle.planner.training_step import TrainingStep
from rekindle.rows.row_tensor import runs_by_rows
from rekindle.torch_private.dispatch_modes import (
    ASKS_DEVICE,
    TorchDispatchMode,
    is_traced,
    past_modes,
    reads_metadata,
)
from rekindle.torch_private.op_types import packet_short_name
from rekindle.torch_private.pytrees import tree_leaves
from rekindle.torch_private.storages import storage_key


@dataclass(eq=False, slots=True)
class Storage:
    """One storage that an op of the step made."""

    nbytes: int
    site: OpSite
    born: int
    """The number of the event in which it was made."""
    freed: int | None = None
    """The number of the event in which it was freed; None if it outlives the step."""
    shape: tuple[int, ...] = ()
    """The shape of the tensor that the op returned."""
    dtype: str = ""
    made_from: "tuple[Storage, ...]" = ()
    """Storages that the op read; empty for a product, such as the head's."""
    classes: int = 0
    """Of logits, and of what is made from them, the number of classes; else 0."""
    of_parameters: bool = False
    """True if its size follows from that of parameters: a cast of one, or its gradient."""
    saves: "list[Save]" = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Save:
    """One tensor that autograd saved."""

    shape: tuple[int, ...]
    dtype: str
    reader: tuple[str, str] | None = None
    """The node of the backward that read it, and the module of its forward."""


@dataclass(frozen=True, slots=True)
class Event:
    """A storage that is made, or freed."""

    storage: Storage
    is_freed: bool
    site: OpSite
    """The op that runs, or ran last."""
    seconds: float | None


@dataclass
class StepRecord:
    """The storages of a step, and the events in which they were made and freed."""

    events: list[Event] = field(default_factory=list)
    backward_at: int | None = None
    """The number of the first event of the backward."""

    def storages(self) -> Iterator[Storage]:
        """The storages, in the order in which they were made."""
        return (event.storage for event in self.events if not event.is_freed)


def record_step(
    step: TrainingStep, device: torch.device, seconds: Callable[[], float] | None = None
) -> StepRecord:
    """Run a step as it is, and record what it makes on a device.

    `seconds` tells the time, where ops are timed.
    """
    torch.clear_autocast_cache()  # so that casts count which an autocast around all this holds
    recorder = _Recorder(step, device, seconds)
    live = LiveBytes(step.existing_tensors(), watcher=recorder)
    with recorder.saved_tensors(), live, recorder:
        step()
    return recorder.record


@dataclass(frozen=True, slots=True)
class _Read:
    """The storages and the shapes of parameters that an op of the forward read."""

    storages: tuple[Storage, ...]
    parameters: tuple[tuple[int, ...], ...]


class _PackedTensor:
    """A saved tensor as autograd holds it."""

    __slots__ = ("kept", "save")

    def __init__(self, kept: KeptTensor, save: Save) -> None:
        self.kept, self.save = kept, save


class _Recorder(TorchDispatchMode):
    """Notes the op that runs, and the storages that the meter says were made and freed."""

    supports_higher_order_operators = True

    def __init__(
        self, step: TrainingStep, device: torch.device, seconds: Callable[[], float] | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = StepRecord()
        self._step = step
        self._device = device
        self._seconds = seconds
        self._finder = SiteFinder(step)
        self._site = OpSite("", "", "forward", None)
        self._alive: dict[int, Storage] = {}
        self._parameters = {
            storage_key(storage): tuple(parameter.shape)
            for parameter in step.model.parameters()
            for storage in storages_of(parameter)
        }
        """The shapes of the model's parameters, by the keys of their storages."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def on_made(self, address: int, nbytes: int) -> None:
        """Note a storage that the meter counts from now on."""
        storage = Storage(nbytes, self._site, len(self.record.events))
        self._alive[address] = storage
        self._add(storage, is_freed=False)

    def on_freed(self, address: int) -> None:
        """Note a storage that the meter counts no more."""
        storage = self._alive.pop(address)
        storage.freed = len(self.record.events)
        self._add(storage, is_freed=True)

    def _add(self, storage: Storage, is_freed: bool) -> None:
        record = self.record
        if record.backward_at is None and self._step.in_backward:
            record.backward_at = len(record.events)
        seconds = None if self._seconds is None else self._seconds()
        record.events.append(Event(storage, is_freed, self._site, seconds))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if runs_by_rows(types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is ASKS_DEVICE or reads_metadata(func) or is_traced():
            return func(*args, **kwargs)
        op = packet_short_name(func)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        read = self._read(given)
        self._site, behind = self._finder.find(op, read)
        if op == "_log_softmax":
            self._mark_logits(args[0], args[1])
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._describe(leaf, func, given, read, behind)
        return out

    def _read(self, given: list[Tensor]) -> _Read:
        storages = tuple(dict.fromkeys(s for tensor in given for s in self._storages(tensor)))
        keys = (storage_key(storage) for tensor in given for storage in storages_of(tensor))
        shapes = (self._parameters[key] for key in keys if key in self._parameters)
        return _Read(storages, tuple(shapes))

    def _storages(self, tensor: Tensor) -> list[Storage]:
        keys = map(storage_key, storages_of(tensor))
        return [self._alive[key] for key in keys if key in self._alive]

    def _describe(
        self, tensor: Tensor, func: Any, given: list[Tensor], read: _Read, behind: _Read | None
    ) -> None:
        """Fill in what the meter does not tell of a storage that was just made."""
        for storage in self._storages(tensor):
            if storage.dtype:
                continue
            storage.shape, storage.dtype = tuple(tensor.shape), _short(tensor.dtype)
            if not is_on(tensor, self._device):
                storage.nbytes = 0  # such as a copy in host memory
            source = behind if behind is not None else read
            if getattr(func, "overloadpacket", func) not in flop_registry:
                storage.made_from = read.storages
            classes = {each.classes for each in source.storages if each.classes}
            storage.classes = max(classes.intersection(storage.shape), default=0)
            if behind is not None:
                storage.of_parameters = _is_gradient_of(storage, behind)
            else:
                storage.of_parameters = bool(given) and all(map(self._is_of_parameters, given))

    def _is_of_parameters(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter, or was made from parameters alone."""
        keys = [storage_key(storage) for storage in storages_of(tensor)]
        made = (self._alive.get(key) for key in keys if key not in self._parameters)
        return bool(keys) and all(each is not None and each.of_parameters for each in made)

    def _mark_logits(self, tensor: Tensor, dim: int) -> None:
        """Mark what a log-softmax reads, and what that was made from up to the head's product."""
        classes = tensor.shape[dim]
        found = self._storages(tensor)
        while found:
            storage = found.pop()
            if not storage.classes and classes in storage.shape:
                storage.classes = classes
                found += storage.made_from

    @contextmanager
    def saved_tensors(self) -> Iterator[None]:
        """Note what autograd saves inside, and who reads it."""

        def pack(tensor: Tensor) -> _PackedTensor:
            save = Save(tuple(tensor.shape), _short(tensor.dtype))
            for storage in self._storages(tensor):
                storage.saves.append(save)
            # Not the tensor itself: a node that saves its own output would hold itself.
            return past_modes(_pack, tensor, save)

        def unpack_saved(packed: _PackedTensor) -> Tensor:
            packed.save.reader = self._finder.reader()
            return unpack(packed.kept)

        with saved_tensors_hooks(pack, unpack_saved):
            yield


def _pack(tensor: Tensor, save: Save) -> _PackedTensor:
    return _PackedTensor(KeptTensor(tensor), save)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_gradient_of(storage: Storage, behind: _Read) -> bool:
    """Return whether a storage of the backward has the shape of a parameter that the op read."""
    shape = sorted(storage.shape)
    return any(shape == sorted(parameter) for parameter in behind.parameters)
