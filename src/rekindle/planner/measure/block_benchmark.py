"""One block run alone, forward and backward: bytes and seconds of a candidate."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from rekindle.modules.apply_strategies import apply, undo
from rekindle.planner.candidate_to_strategy import what_of
from rekindle.planner.measure.cast_cache import as_activations, forward_in_ambient
from rekindle.planner.measure.memory_meter import bytes_of, metered, unmetered
from rekindle.planner.measure.timing import Clock
from rekindle.planner.trace.block_calls import BlockCall, without_graph
from rekindle.planner.trace.block_graph import record
from rekindle.planner.types import BlockTrace, Candidate
from rekindle.regions.saved_indices import recomputable_indices
from rekindle.torch_private.fake_mode import FakeTensor
from rekindle.torch_private.pytrees import tree_leaves, tree_map

_HEAD_START = 0.1
"""Seconds that a device is kept busy at first, until it is known how long the host takes."""


class BlockBenchmark:
    """One block, to be run alone."""

    def __init__(
        self,
        call: BlockCall,
        device: torch.device,
        clock: Clock,
    ) -> None:
        self._around = call.ambient
        self._block = call.block
        self._arguments = call.arguments
        self._device = device
        self._clock = clock
        self._head_start = _HEAD_START
        self.output_freed = -1
        """The least that it let go of its output, by the candidates so far; -1: none yet."""

    def trace(self) -> BlockTrace:
        args, kwargs = self._inputs()
        with forward_in_ambient(
            self._around
        ):  # once before, so that no kernel is chosen or loaded in it
            self._block(*args, **kwargs)
        with forward_in_ambient(self._around):
            forward = partial(self._block, *args, **kwargs)
            return record(forward, self._clock.estimates, self._block)

    def derivable(self, trace: BlockTrace) -> tuple[int, ...]:
        """The numbers of what is saved that one op gives back from other things that are."""
        args, kwargs = self._inputs()
        with forward_in_ambient(self._around):
            return recomputable_indices(
                lambda: self._block(*args, **kwargs), len(trace.saved_tensors)
            )

    def measured(self, candidate: Candidate) -> Candidate:
        """A candidate, with what it costs."""
        what = what_of(candidate.strategy)
        if what != "keep":
            apply(self._block, {"": what})
        try:
            if not self._clock.is_exact:
                self._once()
            held, cached, forward_peak, backward_peak = self._memory()
            given, made = self._let_go()
            with unmetered():
                times = [self._once() for _ in range(self._clock.runs)]
        finally:
            undo(self._block)
            self._head_start = _HEAD_START
        forward, backward, *host = (min(taken) for taken in zip(*times, strict=True))
        forward_host_seconds, backward_host_seconds = host
        self.output_freed = made if self.output_freed < 0 else min(made, self.output_freed)
        return replace(
            candidate,
            bytes_held=held,
            casts_cached=cached,
            forward_seconds=forward,
            backward_seconds=backward,
            forward_peak=forward_peak,
            backward_peak=backward_peak,
            forward_host_seconds=forward_host_seconds,
            backward_host_seconds=backward_host_seconds,
            input_freed=given,
            seconds_noise=_spread(times),
        )

    def timed_again(self, candidates: list[Candidate]) -> list[Candidate]:
        """Options that were measured, timed once more in turns: the least of all runs counts."""
        if self._clock.is_exact:
            return candidates
        found = candidates
        for _ in range(self._clock.runs):
            found = [self._timed_once(candidate) for candidate in found]
        return found

    def _timed_once(self, candidate: Candidate) -> Candidate:
        what = what_of(candidate.strategy)
        if what != "keep":
            apply(self._block, {"": what})
        try:
            self._once()
            forward, backward, forward_host_seconds, backward_host_seconds = self._once()
        finally:
            undo(self._block)
            self._head_start = _HEAD_START
        return replace(
            candidate,
            forward_seconds=min(forward, candidate.forward_seconds),
            backward_seconds=min(backward, candidate.backward_seconds),
            forward_host_seconds=min(forward_host_seconds, candidate.forward_host_seconds),
            backward_host_seconds=min(backward_host_seconds, candidate.backward_host_seconds),
        )

    def _inputs(self) -> tuple[Any, Any]:
        """The block's inputs anew, as another block would hand them over."""
        args, kwargs = as_activations(without_graph(self._arguments))
        return args, kwargs

    def _memory(self) -> tuple[int, int, int, int]:
        """Bytes held after a forward, casts that only autocast's cache held, and two peaks."""
        args, kwargs = self._inputs()
        known = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known += [*self._block.parameters(), *self._block.buffers()]
        known += [p.grad for p in self._block.parameters() if p.grad is not None]
        with metered(self._device, known) as meter:
            with forward_in_ambient(self._around):
                out = self._block(*args, **kwargs)
                with_cache, forward_peak = meter.now(), meter.peak()
            held = meter.now()
            cached = with_cache - held
            rest = _rest_after(out)
            del out
            if rest is None:  # nothing before it learns
                return held, cached, forward_peak, 0
            meter.reset()
            rest.prepare()
            rest.backward()
            return held, cached, forward_peak, meter.peak() - held

    def _let_go(self) -> tuple[int, int]:
        """Bytes of what it is given, and of what it makes of it, that its graph does not hold."""
        args, kwargs = self._inputs()
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        with metered(self._device, inputs) as meter:
            args, kwargs = tree_map(_copied, (args, kwargs))
            with forward_in_ambient(self._around):
                out = self._block(*args, **kwargs)
            with_inputs = meter.now()
            del args, kwargs
            given = with_inputs - meter.now()
            outs = _learning(out)
            if not outs:
                given = bytes_of(inputs)
            graph = [x.grad_fn for x in outs]
            with_output = meter.now()
            del out, outs
            made = with_output - meter.now()
            del graph
        return given, made

    def _once(self) -> tuple[float, float, float, float]:
        """Seconds of a forward and a backward in the middle of a step; then those of the host."""
        args, kwargs = self._inputs()
        clock = self._clock
        clock.keep_busy(self._head_start)
        with forward_in_ambient(self._around):
            begin = clock.mark()
            out = self._block(*args, **kwargs)
            middle = clock.mark()
        rest = _rest_after(out)
        del out
        if rest is not None:
            rest.prepare()
        again = clock.mark()
        if rest is not None:
            rest.backward()
        end = clock.mark()
        device = clock.seconds(begin, middle), clock.seconds(again, end)
        host = clock.host_seconds(begin, middle), clock.host_seconds(again, end)
        self._head_start = min(_HEAD_START, 0.01 + 2 * sum(host))
        return *device, *host


def _spread(times: list[tuple[float, float, float, float]]) -> float:
    """Seconds from the fastest run to the median one: one run that was held up counts for little.

    Of the device or of the host, whichever varies more.
    """
    devices = [forward + backward for forward, backward, *_ in times]
    hosts = [forward + backward for _, _, forward, backward in times]
    return max(median(devices) - min(devices), median(hosts) - min(hosts))


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _learning(out: Any) -> list[Tensor]:
    """The tensors of a block's output that gradients come back to."""
    return [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]


class _Rest:
    """The rest of the step, for a block that is run alone: where its gradients come from.

    It holds none of the block's output, so that this goes as soon as the block lets go of it. Its
    end stands for the loss, which a step holds with its gradient while it runs backward: both are
    numbers in float32, and count.
    """

    def __init__(self, outs: list[Tensor]) -> None:
        self._makers = [_ones_later(out) for out in outs]
        self._gradients: list[Tensor] = []
        self._end: Tensor = _End.apply(self, *outs)  # type: ignore[no-untyped-call]

    def prepare(self) -> None:
        """Make the gradients that the backward begins with."""
        self._gradients = [make() for make in self._makers]
        self._seed = torch.ones_like(self._end)

    def backward(self) -> None:
        self._end.backward(self._seed)

    def take_gradients(self) -> list[Tensor]:
        """The gradients, which are the block's from now on."""
        taken, self._gradients = self._gradients, []
        return taken


def _rest_after(out: Any) -> _Rest | None:
    """What follows a block that made this output; None if nothing in it learns."""
    outs = _learning(out)
    return _Rest(outs) if outs else None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rest: _Rest, *outs: Tensor) -> Tensor:
        ctx.rest = ref(rest)
        return torch.zeros((), device=outs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.rest().take_gradients()


def _ones_later(out: Tensor) -> Callable[[], Tensor]:
    """A function that makes a gradient for a tensor; it holds no plain tensor until then.

    Of a subclass, such as a nested or a sharded tensor, the shape does not tell all.
    """
    if type(out) in (Tensor, FakeTensor):
        return partial(torch.ones, out.shape, dtype=out.dtype, device=out.device)
    return partial(torch.ones_like, out.detach())
