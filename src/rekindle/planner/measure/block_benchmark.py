"""Runs one block alone, forward and backward, by a candidate's strategy: its bytes and seconds."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from rekindle.modules.apply_strategies import apply_strategies, undo
from rekindle.modules.unwrapping import class_name
from rekindle.offload.owners import OffloaderSet
from rekindle.planner.gradient_fingerprints import FingerprintCollector, GradientFingerprints
from rekindle.planner.instruments.memory_meter import bytes_of, metered, meters_freely, unmetered
from rekindle.planner.instruments.timing import Clock
from rekindle.planner.nested_tensors import map_tensors, tensors_in
from rekindle.planner.trace.block_calls import BlockCall
from rekindle.planner.trace.compiled_trace import trace_compiled
from rekindle.planner.types import BlockTrace, Candidate
from rekindle.strategy import Keep, Strategy
from rekindle.torch_private.fake_mode import FakeTensor

_MOST_HEAD_START = 0.1
"""Seconds that a device is kept busy before a block, at most."""


_LONG = 0.1
"""Seconds of a block, of device and host, from which on it is timed once: it varies little."""


_NOISE_OF_ONE_RUN = 0.02
"""Share of its seconds by which a block that is timed once may be off."""


_Bytes = tuple[int, int, int, int]
_Seconds = tuple[float, float, float, float]


class BlockBenchmark:
    """Measures candidates of one block, which is run alone with the arguments of a call."""

    def __init__(
        self, call: BlockCall, device: torch.device, clock: Clock, offloaders: OffloaderSet
    ) -> None:
        self._call = call
        self._block = call.block
        self._device = device
        self._clock = clock
        self._offloaders = offloaders
        self._head_start = 0.0
        """Seconds that the device is kept busy before a block that is timed."""
        self.output_freed = -1
        """Bytes of the block's output that no candidate so far holds; -1 before the first."""

    def __str__(self) -> str:
        return class_name(self._block)

    def measure(self, candidate: Candidate) -> Candidate:
        """Return a candidate with its bytes and seconds."""
        with self._run_by(candidate.strategy):
            first = [] if self._clock.is_exact else [self._time_first()]
            (held, cached, forward_peak, backward_peak), seconds = self._measure_memory()
            input_freed, output_freed = self._measure_freed()
            is_long = any(sum(each) > _LONG for each in first)
            runs = 1 if is_long else self._clock.runs
            times = [seconds] if meters_freely(self._device) else []
            with unmetered():
                times += [self._time_once() for _ in range(runs - len(times))]
        forward, backward, forward_host, backward_host = (
            min(seconds) for seconds in zip(*first, *times, strict=True)
        )
        before = output_freed if self.output_freed < 0 else self.output_freed
        self.output_freed = min(output_freed, before)
        return replace(
            candidate,
            bytes_held=held,
            casts_cached=cached,
            forward_seconds=forward,
            backward_seconds=backward,
            forward_peak=forward_peak,
            backward_peak=backward_peak,
            forward_host_seconds=forward_host,
            backward_host_seconds=backward_host,
            input_freed=input_freed,
            seconds_noise=0.0 if self._clock.is_exact else _spread(times),
        )

    def time_again(self, candidates: list[Candidate]) -> list[Candidate]:
        """Time measured candidates once more, in turns: the shortest of all runs counts."""
        if self._clock.is_exact:
            return candidates
        return [self._timed_again(candidate) for candidate in candidates]

    def _timed_again(self, candidate: Candidate) -> Candidate:
        with self._run_by(candidate.strategy):
            self._time_first()
            with unmetered():
                forward, backward, forward_host, backward_host = self._time_once()
        return replace(
            candidate,
            forward_seconds=min(forward, candidate.forward_seconds),
            backward_seconds=min(backward, candidate.backward_seconds),
            forward_host_seconds=min(forward_host, candidate.forward_host_seconds),
            backward_host_seconds=min(backward_host, candidate.backward_host_seconds),
        )

    def trace_compiled(self, strategy: Strategy) -> BlockTrace:
        """Return the trace of a compiled block by a strategy, after a step that compiles it."""
        with self._run_by(strategy):
            with unmetered():
                self._time_first()
            return trace_compiled(self._call)

    def gradients(self, strategy: Strategy) -> GradientFingerprints:
        """Return the gradients of the block's inputs and parameters, from one random state."""
        collector = FingerprintCollector()
        devices = [self._device] if self._device.type == "cuda" else []
        args, kwargs = self._call.fresh_arguments()
        leaves = [*tensors_in((args, kwargs)), *self._block.parameters()]
        hooks = [
            leaf.register_hook(partial(collector.add, i))
            for i, leaf in enumerate(leaves)
            if leaf.requires_grad
        ]
        try:
            with self._run_by(strategy), torch.random.fork_rng(devices), self._call.entered():
                torch.manual_seed(0)
                _, trained = self._call.used_outputs(self._block(*args, **kwargs))
            rest = _rest_after(trained)
            if rest is not None:
                rest.prepare()
                rest.backward()
        finally:
            for hook in hooks:
                hook.remove()
        return collector.read()

    @contextmanager
    def _run_by(self, strategy: Strategy) -> Iterator[None]:
        """Have the block run by a strategy."""
        if strategy != Keep():
            apply_strategies(self._block, {"": strategy}, offloaders=self._offloaders)
        try:
            yield
        finally:
            undo(self._block)

    def _measure_memory(self) -> tuple[_Bytes, _Seconds]:
        """Return the bytes of a forward and a backward, and their seconds while they are metered.

        Bytes are those held after the forward, those of casts in autocast's cache, and two peaks.
        """
        args, kwargs = self._call.fresh_arguments()
        known = tensors_in((args, kwargs))
        known += [*self._block.parameters(), *self._block.buffers()]
        known += [p.grad for p in self._block.parameters() if p.grad is not None]
        with metered(self._device, known) as meter:
            run = _TimedRun(self._clock, self._head_start)
            with self._call.entered():
                out = run.forward(lambda: self._block(*args, **kwargs))
                forward_peak = meter.peak()
                used, trained = self._call.used_outputs(out)
                del out
                with_cache = meter.now()
            held = meter.now()
            cached = with_cache - held
            rest = _rest_after(trained)
            del used, trained
            meter.reset()
            run.backward(rest)
            backward_peak = meter.peak() - held if rest is not None else 0
        return (held, cached, forward_peak, backward_peak), self._seconds_of(run)

    def _measure_freed(self) -> tuple[int, int]:
        """Return bytes of the block's input, and of its output, that its graph does not hold."""
        args, kwargs = self._call.fresh_arguments()
        inputs = tensors_in((args, kwargs))
        with metered(self._device, inputs) as meter:
            args, kwargs = map_tensors(_cloned, (args, kwargs))
            with self._call.entered():
                out = self._block(*args, **kwargs)
            used, trained = self._call.used_outputs(out)
            del out
            with_inputs = meter.now()
            del args, kwargs
            input_freed = with_inputs - meter.now()
            if not trained:
                input_freed = bytes_of(inputs)
            graph = [x.grad_fn for x in trained]
            with_output = meter.now()
            del used, trained
            output_freed = with_output - meter.now()
            del graph
        return input_freed, output_freed

    def _time_first(self) -> _Seconds:
        """Return the seconds of the first run by a strategy, for which the device is idle.

        The host of a block that waits for the device would else wait for what keeps that busy.
        """
        self._head_start = 0.0
        return self._time_once()

    def _time_once(self) -> _Seconds:
        """Return seconds of a forward and a backward as in a step; then those of the host."""
        args, kwargs = self._call.fresh_arguments()
        run = _TimedRun(self._clock, self._head_start)
        with self._call.entered():
            out = run.forward(lambda: self._block(*args, **kwargs))
        _, trained = self._call.used_outputs(out)
        rest = _rest_after(trained)
        del out, trained
        run.backward(rest)
        return self._seconds_of(run)

    def _seconds_of(self, run: "_TimedRun") -> _Seconds:
        """Return the seconds of a run, by which the next one knows how long its host takes."""
        seconds = run.seconds()
        self._head_start = min(0.002 + 1.5 * sum(seconds[2:]), _MOST_HEAD_START)
        return seconds


class _TimedRun:
    """A forward and a backward of a block on a device that has other work first."""

    def __init__(self, clock: Clock, head_start: float) -> None:
        self._clock = clock
        self._marks: list[Any] = []
        clock.keep_busy(head_start)

    def forward(self, function: Callable[[], Any]) -> Any:
        """Run the forward, and return what it returns."""
        begin = self._clock.mark()
        out = function()
        self._marks += begin, self._clock.mark()
        return out

    def backward(self, rest: "_RestOfStep | None") -> None:
        """Run the backward, if there is one."""
        if rest is not None:
            rest.prepare()
        begin = self._clock.mark()
        if rest is not None:
            rest.backward()
        self._marks += begin, self._clock.mark()

    def seconds(self) -> _Seconds:
        """Return the seconds of the forward and of the backward; then those of the host."""
        begin, middle, again, end = self._marks
        clock = self._clock
        device = clock.seconds(begin, middle), clock.seconds(again, end)
        return *device, clock.host_seconds(begin, middle), clock.host_seconds(again, end)


def _spread(times: list[_Seconds]) -> float:
    """Return the seconds from the fastest run to the median one, of the device or of the host.

    Whichever varies more counts. One run that was held up hardly changes a median. Of one run
    alone that is not known.
    """
    if len(times) == 1:
        forward, backward, *host = times[0]
        return _NOISE_OF_ONE_RUN * max(forward + backward, sum(host))
    devices = [forward + backward for forward, backward, *_ in times]
    hosts = [forward + backward for _, _, forward, backward in times]
    return max(median(devices) - min(devices), median(hosts) - min(hosts))


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.requires_grad else tensor


class _RestOfStep:
    """The rest of the step after a block that is run alone: the source of its gradients.

    It holds none of the block's output, so that this is freed as soon as the block does not hold
    it. Its end stands for the loss, which a step holds with its gradient while it runs backward:
    both are scalars in float32, and count.
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
        """Run the backward."""
        self._end.backward(self._seed)

    def pop_gradients(self) -> list[Tensor]:
        """Return the gradients, and hold them no longer."""
        gradients, self._gradients = self._gradients, []
        return gradients


def _rest_after(trained: list[Tensor]) -> _RestOfStep | None:
    """Return the rest of the step after a block; None if none of its output gets a gradient."""
    return _RestOfStep(trained) if trained else None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rest: _RestOfStep, *outs: Tensor) -> Tensor:
        ctx.rest = ref(rest)
        return torch.zeros((), device=outs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.rest().pop_gradients()


def _ones_later(out: Tensor) -> Callable[[], Tensor]:
    """Return a function that makes a gradient for a tensor, and that holds no plain tensor.

    The gradient is laid out as the tensor is: kernels differ for other strides. For a subclass,
    such as a nested or a sharded tensor, the shape alone is not enough.
    """
    if type(out) not in (Tensor, FakeTensor):
        return partial(torch.ones_like, out.detach())
    shape, strides, dtype, device = out.shape, out.stride(), out.dtype, out.device
    if not _is_dense(shape, strides):
        return partial(torch.ones, shape, dtype=dtype, device=device)
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(1)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements with these strides lie in memory without gaps and overlaps."""
    room = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != room:
            return False
        room *= size
    return True
