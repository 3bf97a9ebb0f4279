"""One block run alone, forward and backward: what it holds by an option, and how long it takes."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from rekindle.budget.execute import what_of
from rekindle.budget.graph import Graph, record
from rekindle.budget.memory import bytes_of, metered
from rekindle.budget.timing import Clock
from rekindle.budget.values import Option
from rekindle.modules.application import apply, undo
from rekindle.selective.by_save import derivable

_HEAD_START = 0.1
"""Seconds that a device is kept busy at first, until it is known how long the host takes."""


class Lone:
    """One block, to be run alone."""

    def __init__(
        self, block: nn.Module, call: tuple[Any, Any], device: torch.device, clock: Clock
    ) -> None:
        self._block = block
        self._call = call
        self._device = device
        self._clock = clock
        self._head_start = _HEAD_START
        self.output_let_go = -1
        """The least that it let go of its output, by the options so far; -1: none yet."""

    def graph(self) -> Graph:
        args, kwargs = self._inputs()
        self._block(*args, **kwargs)  # once before, so that no kernel is chosen or loaded in it
        return record(lambda: self._block(*args, **kwargs), self._clock)

    def derivable(self, graph: Graph) -> tuple[int, ...]:
        """The numbers of what is saved that one op gives back from other things that are."""
        args, kwargs = self._inputs()
        return derivable(lambda: self._block(*args, **kwargs), len(graph.saves))

    def measured(self, option: Option) -> Option:
        """An option, with what it costs."""
        what = what_of(option)
        if what != "keep":
            apply(self._block, {"": what})
        try:
            if not self._clock.is_exact:
                self._once()
            held, forward_peak, backward_peak = self._memory()
            given, made = self._let_go()
            times = [self._once() for _ in range(self._clock.runs)]
        finally:
            undo(self._block)
            self._head_start = _HEAD_START
        forward, backward, *host = (min(taken) for taken in zip(*times, strict=True))
        forward_host, backward_host = host
        self.output_let_go = made if self.output_let_go < 0 else min(made, self.output_let_go)
        return replace(
            option,
            bytes_held=held,
            forward_seconds=forward,
            backward_seconds=backward,
            forward_peak=forward_peak,
            backward_peak=backward_peak,
            forward_host=forward_host,
            backward_host=backward_host,
            input_let_go=given,
        )

    def _inputs(self) -> tuple[Any, Any]:
        """The block's inputs anew, without the graph behind them."""

        def fresh(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.detach().requires_grad_(leaf.requires_grad)

        args, kwargs = tree_map(fresh, self._call)
        return args, kwargs

    def _memory(self) -> tuple[int, int, int]:
        args, kwargs = self._inputs()
        known = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known += [*self._block.parameters(), *self._block.buffers()]
        known += [p.grad for p in self._block.parameters() if p.grad is not None]
        with metered(self._device, known) as meter:
            out = self._block(*args, **kwargs)
            held, forward_peak = meter.now(), meter.peak()
            outs, _ = _seeds(out, with_gradients=False)
            if not outs:  # nothing before it learns
                return held, forward_peak, 0
            end = _End.apply(*outs)  # type: ignore[no-untyped-call]
            del out, outs
            meter.reset()
            end.backward()
            return held, forward_peak, meter.peak() - held

    def _let_go(self) -> tuple[int, int]:
        """Bytes of what it is given, and of what it makes of it, that its graph does not hold."""
        args, kwargs = self._inputs()
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        with metered(self._device, inputs) as meter:
            args, kwargs = tree_map(_copied, (args, kwargs))
            out = self._block(*args, **kwargs)
            with_inputs = meter.now()
            del args, kwargs
            given = with_inputs - meter.now()
            outs, _ = _seeds(out, with_gradients=False)
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
        begin = clock.mark()
        out = self._block(*args, **kwargs)
        middle = clock.mark()
        outs, grads = _seeds(out)
        del out
        again = clock.mark()
        if outs:
            torch.autograd.backward(outs, grads)
        end = clock.mark()
        device = clock.seconds(begin, middle), clock.seconds(again, end)
        host = clock.host_seconds(begin, middle), clock.host_seconds(again, end)
        self._head_start = min(_HEAD_START, 0.01 + 2 * sum(host))
        return *device, *host


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _seeds(out: Any, with_gradients: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    outs = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    return outs, [torch.ones_like(t) for t in outs] if with_gradients else []


class _End(torch.autograd.Function):
    """The end of a block that is run alone: its gradients are made when they are wanted."""

    @staticmethod
    def forward(ctx: Any, *outs: Tensor) -> Tensor:
        ctx.kinds = [(out.shape, out.dtype, out.device) for out in outs]
        return outs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return tuple(torch.ones(shape, dtype=d, device=where) for shape, d, where in ctx.kinds)
