"""Times of blocks within a step: in the company of other blocks, and of a host that may be late.

A block that runs alone has the device to itself, cool and with work queued ahead. In a step it may
take longer, or less. So the step with every block recomputed is timed block by block, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from rekindle.planner.instruments.model_lock import for_this_thread
from rekindle.planner.instruments.timing import Clock
from rekindle.planner.nested_tensors import tensors_in
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import BlockSpans

_Marks = tuple[Any, Any]
"""Where something begins and where it ends."""


def time_with_spans(
    step: TrainingStep, blocks: dict[str, nn.Module], clock: Clock
) -> tuple[float, BlockSpans]:
    """Return the seconds of a step, and those of its blocks in the fastest of its runs."""
    runs: list[_SpanRecorder] = []

    def run() -> None:
        recorder = _SpanRecorder(step, clock)
        with recorder.entered(blocks):
            step()
        runs.append(recorder)

    seconds = clock.timed(run)
    return seconds, min(runs, key=_SpanRecorder.seconds).spans()


class _SpanRecorder:
    """Marks where the blocks of one step begin and end; hooks of its graph hold it, no tensor."""

    def __init__(self, step: TrainingStep, clock: Clock) -> None:
        self._step = step
        self._clock = clock
        self._forward: list[list[Any]] = []
        """The marks around each block's forward."""
        self._running: list[tuple[nn.Module, int]] = []
        """Blocks whose forward runs, with their places."""
        self._backward: list[tuple[int, Any]] = []
        """The places of blocks, with marks, in the order in which their backwards begin."""
        self._ends: dict[int, Any] = {}
        """Marks at which the gradient of a block's input was there, by place."""
        self._begin = self._end = clock.mark()

    @contextmanager
    def entered(self, blocks: dict[str, nn.Module]) -> Iterator[None]:
        """Mark the blocks of the step that runs inside."""
        with ExitStack() as stack:
            for block in blocks.values():
                before, after = for_this_thread(self._before), for_this_thread(self._after)
                for hook in (
                    block.register_forward_pre_hook(before, with_kwargs=True),
                    block.register_forward_hook(after),
                ):
                    stack.callback(hook.remove)
            self._begin = self._clock.mark()
            yield
            self._end = self._clock.mark()

    def seconds(self) -> float:
        """Return the seconds of the whole step."""
        return self._clock.seconds(self._begin, self._end)

    def spans(self) -> BlockSpans:
        """Return the seconds of each block: a backward ends where the next one begins."""
        forward = [(marks[0], marks[-1]) for marks in self._forward]
        backward: list[_Marks | None] = [None] * len(forward)
        for (place, begin), (_, end) in pairwise(self._backward):
            backward[place] = begin, end
        for place, begin in self._backward[-1:]:
            backward[place] = begin, self._ends.get(place, self._end)
        host = self._clock.host_seconds
        forward_host = _seconds(host, forward)
        backward_host = _seconds(host, backward)
        in_blocks = sum(forward_host) + sum(backward_host)
        return BlockSpans(
            _seconds(self._clock.seconds, forward),
            _seconds(self._clock.seconds, backward),
            forward_host,
            backward_host,
            max(host(self._begin, self._end) - in_blocks, 0.0),
        )

    def _before(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self._step.in_backward:  # a block that is run again
            return
        place = len(self._forward)
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._on_input_gradient, place))
        self._running.append((block, place))
        self._forward.append([self._clock.mark()])

    def _after(self, block: nn.Module, _args: Any, out: Any) -> None:
        if self._step.in_backward:
            return
        running, place = self._running.pop()
        while running is not block:  # one that failed, and whose error was caught
            running, place = self._running.pop()
        self._forward[place].append(self._clock.mark())
        for tensor in tensors_in(out):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._on_output_gradient, place))

    def _on_output_gradient(self, place: int, _gradient: Tensor) -> None:
        if self._step.in_backward and all(place != other for other, _ in self._backward):
            self._backward.append((place, self._clock.mark()))

    def _on_input_gradient(self, place: int, _gradient: Tensor) -> None:
        if self._step.in_backward:
            self._ends[place] = self._clock.mark()


def _seconds(
    between: Callable[[Any, Any], float], marks: Sequence[_Marks | None]
) -> tuple[float, ...]:
    return tuple(between(*pair) if pair else 0.0 for pair in marks)
