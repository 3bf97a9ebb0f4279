"""Trace of a training step: the order of its blocks, and the memory and time around them.

Note [What profiling may hold]. Whoever asks for a budget has no room, so profiling peaks no higher
than a step with every block recomputed, but for `whole_step_calibration.SLACK` of the activations
of that step. So that step is measured while nothing else is held; the blocks' inputs are collected
in another forward, one call for each distinct block, without the graphs behind them; a block that
is run alone has the step's memory to itself; and gradients are freed as they come.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from rekindle.planner.input_shapes import count_elements, input_shapes
from rekindle.planner.instruments.cast_cache import CacheWatch
from rekindle.planner.instruments.memory_meter import Meter
from rekindle.planner.instruments.model_lock import for_this_thread
from rekindle.planner.instruments.timing import Clock
from rekindle.planner.nested_tensors import tensors_in
from rekindle.planner.trace.block_outputs import BlockOutput, OutputUse, end_forward
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import StepTrace

OutputUses: TypeAlias = Sequence[tuple[OutputUse, ...]]
"""By place, the uses that the step makes of a block's output."""


def record_step(
    step: TrainingStep,
    blocks: Mapping[str, nn.Module],
    heads: Mapping[str, nn.Module],
    meter: Meter,
    device: torch.device,
    clock: Clock,
) -> tuple[StepTrace, OutputUses]:
    """Run a step by the strategies that its model has now.

    Returns its trace, without keys, and how the output of each call of a block is used.
    """
    torch.clear_autocast_cache()  # so that casts count which an autocast around all this holds
    meter.reset()
    recorder = _StepRecorder(step, blocks, heads, meter, device)
    with recorder.entered():
        begin = clock.mark()
        step()
        end = clock.mark()
    seconds = clock.seconds(begin, end)
    trace = replace(recorder.trace(), seconds=seconds, output_held=step.output_held)
    return trace, recorder.output_uses()


class _StepRecorder:
    """Records, while a step runs, the order of its blocks and the memory around them.

    Hooks of the step's graph hold it, so it holds no tensor.
    """

    def __init__(
        self,
        step: TrainingStep,
        blocks: Mapping[str, nn.Module],
        heads: Mapping[str, nn.Module],
        meter: Meter,
        device: torch.device,
    ) -> None:
        self._step = step
        self._device = device
        self._blocks = blocks
        self._heads = heads
        self._calls_of_heads: dict[str, int] = {}
        """The place of the block that follows each head's first call."""
        self._meter = meter
        self._order: list[str] = []
        self._outputs: dict[int, BlockOutput] = {}
        """By place, the output of each call; one that failed, and whose error was caught, has none.
        """
        self._between: list[int] = []
        self._cast_epochs: list[int] = []
        self._numbers: dict[str, Any] = {}
        """Fields of the trace that are known so far."""
        self._peak = 0
        self._inputs: tuple[tuple[int, ...], ...] = ()
        self._after_block = 0
        """Bytes when the last block's forward had ended."""
        self._backward_started = self._blocks_ended = False
        self._casts = CacheWatch(self._on_cache_emptied)
        self._epoch = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Record the step that runs inside."""
        with ExitStack() as stack:
            stack.callback(self._casts.close)
            on_call = for_this_thread(self._on_model_call)
            hook = self._step.model.register_forward_pre_hook(on_call, with_kwargs=True)
            stack.callback(hook.remove)
            self._step.before_backward = self._end_forward
            stack.callback(setattr, self._step, "before_backward", None)
            for path, block in self._blocks.items():
                before = for_this_thread(partial(self._before_block, path))
                hooks = (  # around those that gather a block's parameters and free them
                    block.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                    block.register_forward_hook(for_this_thread(self._after_block_forward)),
                )
                for hook in hooks:
                    stack.callback(hook.remove)
            for path, head in self._heads.items():
                on_head = for_this_thread(partial(self._on_head, path))
                stack.callback(head.register_forward_pre_hook(on_head).remove)
            yield
        if self._order and not self._backward_started:  # no block has a gradient of its own
            self._numbers["rest_peak"] = max(self._meter.peak() - self._after_block, 0)
        self._note_peak()
        if self._blocks_ended:
            self._numbers["last_peak"] = self._meter.peak()

    def trace(self) -> StepTrace:
        """The trace of the step that ran."""
        return StepTrace(
            order=tuple(self._order),
            between=tuple(self._between),
            cast_epochs=tuple(self._cast_epochs),
            peak=self._peak,
            inputs=self._inputs,
            backward_begins=tuple(
                None if (out := self._outputs.get(i)) is None else out.begins
                for i in range(len(self._order))
            ),
            followed=frozenset(
                path for path, place in self._calls_of_heads.items() if place < len(self._order)
            ),
            **self._numbers,
        )

    def output_uses(self) -> list[tuple[OutputUse, ...]]:
        """The step's use of the output at each place; empty for a call that failed."""
        return [
            () if (out := self._outputs.get(i)) is None else out.uses()
            for i in range(len(self._order))
        ]

    def _note_peak(self) -> None:
        self._peak = max(self._peak, self._meter.peak())

    def _begin_new_peak(self) -> None:
        self._note_peak()
        self._meter.reset()

    def _on_model_call(self, _model: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs = max(self._inputs, input_shapes(args, kwargs), key=count_elements)

    def _on_head(self, path: str, _head: nn.Module, _args: Any) -> None:
        if not self._step.in_backward:
            self._calls_of_heads.setdefault(path, len(self._order))

    def _before_block(self, path: str, _block: nn.Module, args: Any, kwargs: Any) -> None:
        meter = self._meter
        if self._step.in_backward:
            return
        if self._order:
            self._between.append(max(meter.now() - self._after_block, 0))
        else:
            self._numbers.update(before_bytes=meter.now(), first_peak=meter.peak())
            self._between.append(0)
            for tensor in tensors_in((args, kwargs)):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._on_blocks_ended)
        self._order.append(path)
        self._cast_epochs.append(self._epoch)
        self._casts.watch(self._device)

    def _after_block_forward(self, _block: nn.Module, _args: Any, out: Any) -> None:
        if self._step.in_backward:
            return
        place = len(self._order) - 1
        self._outputs[place] = BlockOutput(out, self._on_gradient, self._now_without_loss)
        self._after_block = self._meter.now()
        self._begin_new_peak()
        self._numbers["casts_freed_before_backward"] = False

    def _now_without_loss(self) -> int:
        """Bytes in use, without the loss and its gradient: both are in the peaks of each block."""
        scalar = 512 if self._device.type == "cuda" else 4
        return self._meter.now() - 2 * scalar

    def _end_forward(self, loss: Tensor) -> None:
        end_forward(self._outputs.values(), loss)

    def _on_cache_emptied(self) -> None:
        """Note the peak while autocast's cache held casts; the cache is being emptied."""
        self._epoch += 1
        if not self._backward_started:
            self._numbers["casts_freed_before_backward"] = True
            self._numbers["cached_rest_peak"] = self._meter.peak() - self._after_block
            self._note_peak()
            self._meter.reset_soon()

    def _on_gradient(self, _grad: Tensor) -> bool:
        """Note the peak since the last block's forward, at the first gradient of a block.

        Gradients that the forward itself computes, as of a penalty on them, do not count: returns
        False for them.
        """
        if self._step.in_backward and not self._backward_started:
            self._backward_started = True
            self._numbers["rest_peak"] = self._meter.peak() - self._after_block
            self._numbers["casts_in_backward"] = self._casts.holds_casts
        return self._step.in_backward

    def _on_blocks_ended(self, _grad: Tensor) -> None:
        """Begin a new peak: the first block's input has its gradient."""
        if self._step.in_backward:
            self._blocks_ended = True
            self._begin_new_peak()
