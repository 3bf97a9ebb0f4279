"""Traces of one step by each way to run its heads: by rows where that saves memory, and as a whole.

Heads are found by running the step: modules that may be heads go by rows, and those that a block
follows, or whose outputs a loss does not take by rows, are none.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from traceback import walk_tb

import torch
from torch import nn

from rekindle.errors import RekindleError
from rekindle.modules.apply_strategies import apply_strategies, undo
from rekindle.modules.heads import heads_of, saved_by_rows
from rekindle.modules.unwrapping import class_name, in_places
from rekindle.planner.instruments.memory_meter import Meter, metered, unmetered
from rekindle.planner.instruments.timing import LONG, Clock
from rekindle.planner.placement import free_bytes
from rekindle.planner.ranks.rank_sync import all_gather, has_other_ranks
from rekindle.planner.trace.block_calls import BlockCall, collect_calls
from rekindle.planner.trace.block_outputs import used_by_all
from rekindle.planner.trace.block_spans import time_with_spans
from rekindle.planner.trace.step_trace import OutputUses, record_step
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import BlockKey, StepTrace
from rekindle.strategy import Recompute, Rows, Strategy

_log = logging.getLogger("rekindle")
_LEAST_SHARE = 0.02
"""Share of a step's peak that heads by rows have to save, so that they are worth a try."""


@dataclass(frozen=True)
class TracedSteps:
    """Steps with every block recomputed, by each way to run the heads."""

    first: StepTrace
    """The one with the lowest peak; its blocks were timed, and their calls collected."""
    others: tuple[StepTrace, ...]
    """If heads go by rows in the first one: the step without that, and without logits."""
    calls: dict[BlockKey, BlockCall]
    """Calls of distinct blocks."""


def trace_steps(
    step: TrainingStep,
    blocks: dict[str, nn.Module],
    device: torch.device,
    clock: Clock,
    exact: bool = True,
    *,
    compiles: bool = False,
) -> TracedSteps:
    """Run a step with every block recomputed, by each way to run the heads.

    Heads go by rows first, which has the lowest peak. As a whole they run if the device has room.
    If gradients need not be exact, they also go by rows without logits. `compiles` says that a
    first run compiles blocks, which takes time and memory of its own.
    """
    others = []
    if compiles:
        recomputed = in_places(step.model, dict.fromkeys(blocks, Recompute()))
        apply_strategies(step.model, recomputed)
        with unmetered():
            step()
    # One meter for all: it takes tensors that a step reads, as from a closure, for ones that the
    # step makes; another one would take them for ones that existed before.
    with metered(device, step.existing_tensors()) as meter:
        ways = _Ways(step, blocks, meter, device, clock)
        traced, uses = ways.trace_by_rows()
        first = ways.timed(traced)
        if first.heads:
            plain = _without_rows(first)
            if ways.has_room_for(plain):
                plain = ways.timed(ways.trace({})[0], first.seconds)
            others.append(plain)
            if not exact:
                tiled, _ = ways.trace({path: Rows(exact=False) for path, _, _ in first.heads})
                others.append(ways.timed(tiled, first.seconds))
    ways.apply({path: strategy for path, _, strategy in first.heads})
    collected = collect_calls(step, blocks)
    undo(step.model)
    for trace in (first, *others):
        if trace.order != collected.order:
            raise RekindleError(
                "The step ran other blocks when it was run again: "
                f"{_format_difference(trace.order, collected.order)}. A plan needs a step that "
                "repeats itself from the same random state of torch, Python and numpy."
            )
    first = replace(first, keys=collected.keys, passed=collected.passed)
    calls = {
        key: replace(call, output_uses=used_by_all([uses[i] for i in _places(first, key)]))
        for key, call in collected.calls.items()
    }
    return TracedSteps(first, tuple(others), calls)


def _places(trace: StepTrace, key: BlockKey) -> list[int]:
    """The places of the forward at which a block with some key ran."""
    return [i for i, path in enumerate(trace.order) if trace.keys[path] == key]


class _Ways:
    """Runs one step with every block recomputed, and its heads by one strategy or another."""

    def __init__(
        self,
        step: TrainingStep,
        blocks: dict[str, nn.Module],
        meter: Meter,
        device: torch.device,
        clock: Clock,
    ) -> None:
        self._step, self._blocks = step, blocks
        self._meter, self._device, self._clock = meter, device, clock
        self._heads = heads_of(step.model, blocks)

    def apply(self, heads: Mapping[str, Strategy]) -> None:
        """Have every block recomputed, and some heads run by strategies."""
        strategies = {**dict.fromkeys(self._blocks, Recompute()), **heads}
        apply_strategies(self._step.model, in_places(self._step.model, strategies))

    def trace(self, heads: Mapping[str, Strategy]) -> tuple[StepTrace, OutputUses]:
        """Trace the step with some heads run by strategies."""
        self.apply(heads)
        modules = {path: self._heads[path] for path in heads}
        trace, uses = record_step(
            self._step, self._blocks, modules, self._meter, self._device, self._clock
        )
        saved = [saved_by_rows(module) for module in modules.values()]
        kinds = [class_name(module) for module in modules.values()]
        found = replace(
            trace,
            heads=tuple(zip(heads, kinds, heads.values(), strict=True)),
            saved_by_rows=sum(nbytes or 0 for nbytes in saved),
        )
        return found, uses

    def trace_by_rows(self) -> tuple[StepTrace, OutputUses]:
        """Trace the step with those heads by rows that save memory; whole ones if rows fail."""
        if not self._heads or has_other_ranks():  # others would wait for a rank that fails alone
            return self._trace_by_rows()
        try:
            return self._trace_by_rows()
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or not _is_of_rows(error):
                raise
            reason = f"{type(error).__name__}: {error}"
        found = self.trace({})
        _log.warning(
            "%s fails if logits go by rows, so its head runs as a whole: %s",
            class_name(self._step.model),
            reason,
        )
        return found

    def _trace_by_rows(self) -> tuple[StepTrace, OutputUses]:
        trace, uses = self.trace(dict.fromkeys(self._heads, Rows()))
        went = {path for path, head in self._heads.items() if saved_by_rows(head) is not None}
        worth = {path for path in went - trace.followed if saved_by_rows(self._heads[path])}
        if trace.saved_by_rows < _LEAST_SHARE * trace.peak:
            worth = set()
        went, worth = (set().union(*all_gather(paths)) for paths in (went, worth))
        if went != worth:
            return self.trace({path: Rows() for path in self._heads if path in worth})
        heads = tuple(head for head in trace.heads if head[0] in worth)
        return replace(trace, heads=heads), uses

    def timed(self, trace: StepTrace, known: float = 0.0) -> StepTrace:
        """Return a trace with the times of the step that ran last, without a meter.

        If it is known to be long, the time of the run that was traced is good enough.
        """
        if self._clock.is_exact or known > LONG:
            return trace
        with unmetered():
            seconds, spans = time_with_spans(self._step, self._blocks, self._clock)
        return replace(trace, seconds=seconds, spans=spans)

    def has_room_for(self, trace: StepTrace) -> bool:
        """Return whether the devices of all ranks have room for a step."""
        free = None if self._clock.is_exact else free_bytes(self._device)
        return all(all_gather(free is None or trace.peak <= free))


def _is_of_rows(error: Exception) -> bool:
    """Return whether an error was raised where logits are computed by rows."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    return any(name.startswith("rekindle.rows.") for name in modules)


def _without_rows(trace: StepTrace) -> StepTrace:
    """Return what the trace of a step would be at most if its heads ran as a whole."""
    saved = trace.saved_by_rows
    return replace(
        trace,
        heads=(),
        rest_peak=trace.rest_peak + saved,
        cached_rest_peak=trace.cached_rest_peak + saved,
        peak=trace.peak + saved,
        is_measured=False,
    )


def _format_difference(first: tuple[str, ...], second: tuple[str, ...]) -> str:
    for i in range(max(len(first), len(second))):
        one, other = (order[i] if i < len(order) else None for order in (first, second))
        if one != other:
            names = [repr(path) if path is not None else "none" for path in (one, other)]
            return f"as number {i + 1} it ran {names[0]}, then {names[1]}"
    raise AssertionError("they differ")
