"""How often a block runs to be measured: it does so by each candidate, of which there are many."""

from typing import Any

import pytest
import torch

from rekindle.offload.owners import OffloaderSet
from rekindle.planner.instruments.timing import DeviceClock
from rekindle.planner.measure import block_benchmark
from rekindle.planner.measure.block_benchmark import BlockBenchmark
from rekindle.planner.trace.block_calls import collect_calls
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import Candidate
from rekindle.strategy import Keep, Recompute
from tests.toys import Stack

CPU = torch.device("cpu")


def measured(strategy: Any) -> tuple[Candidate, int]:
    """A candidate that is timed once, as on a GPU, and how often its block was called."""
    model, x = Stack(1, 16), torch.randn(32, 16, requires_grad=True)
    (call,) = collect_calls(TrainingStep(model, x), {"blocks.0": model.blocks[0]}).calls.values()
    calls: list[None] = []
    call.block.register_forward_pre_hook(lambda *_: calls.append(None))
    clock = DeviceClock(CPU)
    clock.runs = 1
    found = BlockBenchmark(call, CPU, clock, OffloaderSet()).measure(Candidate(strategy))
    return found, len(calls)


def bytes_of(candidate: Candidate) -> tuple[int, ...]:
    peaks = candidate.forward_peak, candidate.backward_peak
    return candidate.bytes_held, candidate.casts_cached, candidate.input_freed, *peaks


@pytest.mark.parametrize("strategy", [Keep(), Recompute()])
def test_a_meter_that_costs_no_time_leaves_out_a_run(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To warm up, for bytes, for what the graph does not hold, and for the time."""
    apart, runs_apart = measured(strategy)
    monkeypatch.setattr(block_benchmark, "meters_freely", lambda _device: True)
    together, runs_together = measured(strategy)
    assert (runs_apart, runs_together) == (4, 3)
    assert bytes_of(together) == bytes_of(apart)
    assert together.forward_seconds > 0
    assert together.backward_seconds > 0
