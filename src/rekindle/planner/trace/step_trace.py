"""A step with every block recomputed: what its blocks are given, and what is around them.

Note [What profiling may hold]. Whoever asks for a budget has no room, so profiling peaks no higher
than a step with every block recomputed, but for `together.SLACK` of what activations take in it. So
that step is measured while nothing else is held; the blocks' inputs are gathered in another
forward, one call for each distinct block, without the graphs behind them; a block that is run alone
has the step's memory to itself; and gradients are let go of as they come.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from rekindle.errors import RekindleError
from rekindle.modules.apply_strategies import apply, undo
from rekindle.modules.unwrapping import in_places
from rekindle.planner.input_shapes import elements, input_shapes
from rekindle.planner.measure.cast_cache import CacheWatch
from rekindle.planner.measure.memory_meter import Meter, metered, storages_of, unmetered
from rekindle.planner.measure.model_lock import on_this_thread
from rekindle.planner.measure.timing import Clock
from rekindle.planner.ranks.rank_sync import wait_for_all_ranks
from rekindle.planner.training_step import Step
from rekindle.regions.recompute import ambient
from rekindle.torch_private.data_parallel import sharded_parameters
from rekindle.torch_private.pytrees import tree_leaves, tree_map
from rekindle.torch_private.storages import storage_key

Call = tuple[Any, Any]
"""Positional and keyword arguments."""
KeyOf = Callable[[str, Call, ambient.Ambient], Hashable]
"""Tells a block's calls apart, by its path, its arguments and what is around it."""


@dataclass
class Seen:
    """What one step showed of its blocks."""

    order: list[str] = field(default_factory=list)
    between: list[int] = field(default_factory=list)
    before: int = 0
    rest_peak: int = 0
    first_peak: int = 0
    last_peak: int = 0
    peak: int = 0
    """The most that the whole step had, above what is there all the time."""
    seconds: float = 0.0
    cast_epochs: list[int] = field(default_factory=list)
    """How often autocast's cache was emptied before each block."""
    cached_rest_peak: int = 0
    """As `rest_peak`, until the cache was emptied."""
    casts_gone: bool = False
    """Whether the cache was emptied between the last block's forward and its backward."""
    casts_in_backward: bool = False
    """Whether it was not, and held casts."""
    inputs: tuple[tuple[int, ...], ...] = ()
    """The shapes that the model was called with; the largest, of several calls."""
    passed: list[int] = field(default_factory=list)
    keys: dict[str, Hashable] = field(default_factory=dict)
    """The key of each block's first call."""
    calls: dict[Hashable, Call] = field(default_factory=dict)
    """Arguments of the first call with each key, without the graphs behind them."""
    around: dict[Hashable, ambient.Ambient] = field(default_factory=dict)
    """The ambient state of that call, such as autocast."""


def outline(
    step: Step, blocks: dict[str, nn.Module], device: torch.device, clock: Clock, key_of: KeyOf
) -> Seen:
    """Run a step with every block recomputed, and see what its blocks are given and hold."""
    apply(step.model, in_places(step.model, dict.fromkeys(blocks, "recompute")))
    torch.clear_autocast_cache()  # so that casts count which an autocast around all this holds
    with metered(device, step.there_before()) as meter:
        watch = _Watch(step.model, blocks, meter, device)
        with watch.entered():
            begin = clock.mark()
            step()
            end = clock.mark()
    seen = watch.seen
    if clock.is_exact:
        seen.seconds = clock.seconds(begin, end)
    else:
        with unmetered():
            seen.seconds = clock.timed(step)
    _gather_calls(step, blocks, key_of, seen)
    undo(step.model)
    return seen


class _Watch:
    """Notes, while a step runs, the order of its blocks and the memory around them.

    Hooks of the step's graph hold it, so it holds no tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: dict[str, nn.Module],
        meter: Meter,
        device: torch.device,
    ) -> None:
        self._device = device
        self.seen = Seen()
        self._model = model
        self._blocks = blocks
        self._meter = meter
        self._after_block = 0
        self._backward_started = self._has_ended = False
        self._casts = CacheWatch(self._emptied)
        self._epoch = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self._casts.close)
            called = on_this_thread(self._called)
            hook = self._model.register_forward_pre_hook(called, with_kwargs=True)
            stack.callback(hook.remove)
            for path, block in self._blocks.items():
                before = on_this_thread(partial(self._before, path))
                hooks = (  # around those that gather a block's parameters and let go of them
                    block.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                    block.register_forward_hook(on_this_thread(self._after)),
                )
                for hook in hooks:
                    stack.callback(hook.remove)
            yield
        self._note_peak()
        if self._has_ended:
            self.seen.last_peak = self._meter.peak()

    def _note_peak(self) -> None:
        self.seen.peak = max(self.seen.peak, self._meter.peak())

    def _begin_new_peak(self) -> None:
        self._note_peak()
        self._meter.reset()

    def _called(self, _model: nn.Module, args: Any, kwargs: Any) -> None:
        self.seen.inputs = max(self.seen.inputs, input_shapes(args, kwargs), key=elements)

    def _before(self, path: str, _block: nn.Module, args: Any, kwargs: Any) -> None:
        seen, meter = self.seen, self._meter
        if self._backward_started:
            return
        if seen.order:
            seen.between.append(max(meter.now() - self._after_block, 0))
        else:
            seen.before, seen.first_peak = meter.now(), meter.peak()
            seen.between.append(0)
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
                    leaf.register_hook(self._end)
        seen.order.append(path)
        seen.cast_epochs.append(self._epoch)
        self._casts.watch(self._device)

    def _after(self, _block: nn.Module, _args: Any, out: Any) -> None:
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._turn)
        self._after_block = self._meter.now()
        self._begin_new_peak()
        self.seen.casts_gone = False

    def _emptied(self) -> None:
        """Autocast's cache is being emptied."""
        self._epoch += 1
        if not self._backward_started:
            self.seen.casts_gone = True
            self.seen.cached_rest_peak = self._meter.peak() - self._after_block
            self._note_peak()
            self._meter.reset_soon()

    def _turn(self, _grad: Tensor) -> None:
        if not self._backward_started:
            self._backward_started = True
            self.seen.rest_peak = self._meter.peak() - self._after_block
            self.seen.casts_in_backward = self._casts.holds_casts

    def _end(self, _grad: Tensor) -> None:
        self._has_ended = True
        self._begin_new_peak()


def _gather_calls(step: Step, blocks: dict[str, nn.Module], key_of: KeyOf, seen: Seen) -> None:
    """Gather the calls of distinct blocks, and the bytes that blocks hand on."""
    gathering = _Gathering(key_of)
    with ExitStack() as stack:
        for path, block in blocks.items():
            before = on_this_thread(partial(gathering.before, path))
            hook = block.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            stack.callback(hook.remove)
            after = on_this_thread(gathering.after)
            stack.callback(block.register_forward_hook(after).remove)
        loss = step.loss()
        gathering.ended()
    wait_for_all_ranks()  # before a backward that one may not come to
    if sharded_parameters(step.model):
        loss.backward()  # FSDP minds a forward without one
    if gathering.order != seen.order:
        raise RekindleError(
            "The step ran other blocks when it was run again: "
            f"{_first_difference(seen.order, gathering.order)}. A plan needs a step that repeats "
            "itself from the same random state of torch, Python and numpy."
        )
    seen.passed, seen.keys = gathering.passed, gathering.keys
    seen.calls, seen.around = gathering.calls, gathering.around


def _first_difference(first: list[str], second: list[str]) -> str:
    for i in range(max(len(first), len(second))):
        one, other = (order[i] if i < len(order) else None for order in (first, second))
        if one != other:
            told = [repr(path) if path is not None else "none" for path in (one, other)]
            return f"as number {i + 1} it ran {told[0]}, then {told[1]}"
    raise AssertionError("they differ")


class _Gathering:
    """Gathers calls in a forward that gives each block copies of what it is handed.

    A block holds the copies, if anything. So when the next block begins, what was handed on is gone
    or somebody else's.
    """

    def __init__(self, key_of: KeyOf) -> None:
        self.order: list[str] = []
        self.keys: dict[str, Hashable] = {}
        self.calls: dict[Hashable, Call] = {}
        self.around: dict[Hashable, ambient.Ambient] = {}
        self.passed: list[int] = []
        """Bytes that each block is given by the one before, and that nobody else holds."""
        self._key_of = key_of
        self._given: list[weakref.ref[UntypedStorage]] = []
        """The storages that the block which runs was given."""
        self._made: list[weakref.ref[UntypedStorage]] = []
        """The storages that the last block gave out and was not given itself."""
        self._handed: list[tuple[weakref.ref[UntypedStorage], int]] | None = None
        """Storages that it was given by the one before, with their bytes; None before the first."""

    def before(self, path: str, _block: nn.Module, args: Any, kwargs: Any) -> Any:
        self._settle()
        self.order.append(path)
        made = _keys(self._made)
        handed: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}

        def copied(leaf: Any) -> Any:
            storages = storages_of(leaf) if isinstance(leaf, Tensor) else []
            ours = [storage for storage in storages if storage_key(storage) in made]
            if not ours:
                return leaf
            for storage in ours:
                handed[storage_key(storage)] = weakref.ref(storage), storage.nbytes()
            return leaf.clone()

        given: Call = tree_map(copied, (args, kwargs))
        self._handed = list(handed.values())
        self._given = _weak_storages(given)
        if path not in self.keys:
            around = ambient.take()
            key = self.keys[path] = self._key_of(path, given, around)
            if key not in self.calls:
                self.calls[key] = without_graph(given)
                self.around[key] = around
        return given

    def after(self, _block: nn.Module, _args: Any, out: Any) -> None:
        # What is handed through is copied once: a copy for each block would be memory of its own.
        through = _keys(self._given)
        self._made = [weak for weak in _weak_storages(out) if not _keys([weak]) & through]

    def _settle(self) -> None:
        if self._handed is not None:
            self.passed.append(sum(nbytes for weak, nbytes in self._handed if weak() is None))

    def ended(self) -> None:
        """The forward is over; the last block counts as the one before it, if that is gone."""
        self._settle()
        if self.passed:
            self.passed[-1] = min(self.passed[-2:])


def _weak_storages(values: Any) -> "list[weakref.ref[UntypedStorage]]":
    """The storages behind the tensors among some values, held by nobody here."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [weakref.ref(storage) for tensor in tensors for storage in storages_of(tensor)]


def _keys(weak_storages: "Iterable[weakref.ref[UntypedStorage]]") -> set[int]:
    """The keys of those storages that are alive."""
    return {storage_key(storage) for weak in weak_storages if (storage := weak()) is not None}


def without_graph(call: Call) -> Call:
    """The same arguments, as leaves: they share the memory and hold no graph."""

    def alone(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().requires_grad_(leaf.requires_grad)

    alone_again: Call = tree_map(alone, call)
    return alone_again
