"""A step with every block recomputed: what its blocks are given, and what is around them."""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._pytree import tree_leaves, tree_map

from rekindle.budget.memory import Meter, metered, storage_of
from rekindle.budget.shapes import elements, input_shapes
from rekindle.budget.step import Step
from rekindle.budget.timing import Clock
from rekindle.internals import storage_key
from rekindle.modules.application import apply, undo
from rekindle.replay import ambient


@dataclass
class Seen:
    """What one step showed of its blocks."""

    order: list[str] = field(default_factory=list)
    calls: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """What each block was given, the first time."""
    around: dict[str, ambient.Ambient] = field(default_factory=dict)
    """What was around it, such as autocast."""
    between: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    before: int = 0
    rest_peak: int = 0
    first_peak: int = 0
    last_peak: int = 0
    inputs: tuple[tuple[int, ...], ...] = ()
    """The shapes that the model was called with; the largest, of several calls."""


def outline(
    step: Step, blocks: dict[str, nn.Module], device: torch.device, clock: Clock
) -> tuple[Seen, float]:
    """A step with every block recomputed: what its blocks are given, and what is around them."""
    apply(step.model, dict.fromkeys(blocks, "recompute"))
    known = [*step.model.parameters(), *step.model.buffers()]
    known += [p.grad for p in step.model.parameters() if p.grad is not None]
    known += step.tensors()
    with metered(device, known) as meter:
        watch = _Watch(step.model, blocks, meter)
        with watch.entered():
            begin = clock.mark()
            step()
            end = clock.mark()
    seconds = clock.seconds(begin, end) if clock.is_exact else clock.timed(step)
    watch.seen.passed = _passed(step, blocks)
    undo(step.model)
    return watch.seen, seconds


class _Watch:
    """Notes, while a step runs, how its blocks are called and what memory is around them."""

    def __init__(self, model: nn.Module, blocks: dict[str, nn.Module], meter: Meter) -> None:
        self.seen = Seen()
        self._model = model
        self._blocks = blocks
        self._meter = meter
        self._after_block = 0
        self._has_turned = self._has_ended = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            called = self._model.register_forward_pre_hook(self._called, with_kwargs=True)
            stack.callback(called.remove)
            for path, block in self._blocks.items():
                before = partial(self._before, path)
                hooks = (
                    block.register_forward_pre_hook(before, with_kwargs=True),
                    block.register_forward_hook(self._after),
                )
                for hook in hooks:
                    stack.callback(hook.remove)
            yield
        if self._has_ended:
            self.seen.last_peak = self._meter.peak()

    def _called(self, _model: nn.Module, args: Any, kwargs: Any) -> None:
        self.seen.inputs = max(self.seen.inputs, input_shapes(args, kwargs), key=elements)

    def _before(self, path: str, _block: nn.Module, args: Any, kwargs: Any) -> None:
        seen, meter = self.seen, self._meter
        if self._has_turned:
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
        seen.calls.setdefault(path, (args, kwargs))
        seen.around.setdefault(path, ambient.take())

    def _after(self, _block: nn.Module, _args: Any, out: Any) -> None:
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._turn)
        self._after_block = self._meter.now()
        self._meter.reset()

    def _turn(self, _grad: Tensor) -> None:
        if not self._has_turned:
            self._has_turned = True
            self.seen.rest_peak = self._meter.peak() - self._after_block

    def _end(self, _grad: Tensor) -> None:
        self._has_ended = True
        self._meter.reset()


def _passed(step: Step, blocks: dict[str, nn.Module]) -> list[int]:
    """Bytes that each block is given by the one before, and that nobody else holds."""
    passing = _Passing()
    with ExitStack() as stack:
        for block in blocks.values():
            hook = block.register_forward_pre_hook(passing.before, with_kwargs=True)
            stack.callback(hook.remove)
            stack.callback(block.register_forward_hook(passing.after).remove)
        loss = step.loss()
        found = passing.ended()
    loss.backward()  # DDP minds a forward without one
    return found


class _Passing:
    """Notes what blocks hand on, in a forward that gives each of them copies.

    A block holds the copies, if anything. So when the next block begins, what was handed on is gone
    or somebody else's.
    """

    def __init__(self) -> None:
        self._found: list[int] = []
        self._made: list[weakref.ref[UntypedStorage]] = []
        """What the last block gave out."""
        self._handed: list[tuple[weakref.ref[UntypedStorage], int]] | None = None
        """What it was given by the one before, and how much that is; None before the first."""

    def before(self, _block: nn.Module, args: Any, kwargs: Any) -> Any:
        self._settle()
        made = {storage_key(storage) for weak in self._made if (storage := weak()) is not None}
        handed: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}

        def copied(leaf: Any) -> Any:
            storage = storage_of(leaf) if isinstance(leaf, Tensor) else None
            if storage is None or storage_key(storage) not in made:
                return leaf
            handed[storage_key(storage)] = weakref.ref(storage), storage.nbytes()
            return leaf.clone()

        given = tree_map(copied, (args, kwargs))
        self._handed = list(handed.values())
        return given

    def after(self, _block: nn.Module, _args: Any, out: Any) -> None:
        storages = [storage_of(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._made = [weakref.ref(storage) for storage in storages if storage is not None]

    def _settle(self) -> None:
        if self._handed is not None:
            self._found.append(sum(nbytes for weak, nbytes in self._handed if weak() is None))

    def ended(self) -> list[int]:
        """What each block was handed; the last one as the one before it, if that is gone by now."""
        self._settle()
        if self._found:
            self._found[-1] = min(self._found[-2:])
        return self._found
