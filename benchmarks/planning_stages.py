"""What `rekindle.fit` runs to plan models of the zoo, stage by stage: for `scripts/bench planning`.

The models are tiny, with as many layers as those of a GPU's size, so a step is Python and dispatch
alone: as on a GPU where the host is the limit. Counted are the ops that planning runs, as multiples
of those of a plain step, and its CPU time. Planning goes as it does beside a GPU: blocks are timed
once, there is a link, and a step with blocks op by op is timed. That the link and the device are
those of a CPU changes times and plans, not what is run to find them. What it shows too much of is
metering: a CPU's memory is metered op by op, in Python, and a GPU's by its allocator.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from benchmarks.measure import format_table
from benchmarks.zoo_models import FAMILIES, Case
from rekindle.planner.instruments.timing import DeviceClock
from rekindle.planner.profile_model import MeasuringDevice, measuring_device, profile_model
from rekindle.planner.progress import Progress, report_progress, show_progress

MODELS = ("bert", "gpt2", "t5", "vit", "convnext", "resnet", "swin", "mixtral", "lora")
"""Those of the zoo's GPU table."""
PLANS = "a plan"
"""The column of what it takes to measure a plan."""
STAGES = {
    "trace": "trace",
    "block": "blocks",
    "candidate": "blocks",
    "whole step": "whole step",
    "solve": "solve",
    "plain step": PLANS,
    "verify": PLANS,
    "another plan": PLANS,
    "compare gradients": "gradients",
}
"""The column of each stage that planning reports."""
COLUMNS = tuple(dict.fromkeys(STAGES.values()))
_LINK = 5e8
"""Bytes a second, with which tiny models have about the time to move results that large ones have
on a GPU."""


@dataclass(frozen=True)
class Stages:
    """What it took to plan one model for one budget."""

    model: str
    budget: str
    blocks: int
    distinct: int
    step_ms: float
    """CPU time of a plain step."""
    seconds: dict[str, float]
    """CPU time of each stage."""
    ops: dict[str, float]
    """Ops of each stage, as multiples of those of a plain step."""
    plans: int
    """Plans whose steps were measured, when planning was timed."""
    plans_counted: int
    """Plans whose steps were measured, when ops were counted: it depends on times, too."""


class _Count(TorchDispatchMode):
    """Passes ops on, and counts them."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ops += 1
        return func(*args, **(kwargs or {}))


class _StageMeter(Progress):
    """Adds up CPU time and ops by the stage that is reported, and shows nothing."""

    def __init__(self, count: _Count) -> None:
        super().__init__(wanted=False)
        self._count = count
        self.seconds = dict.fromkeys(COLUMNS, 0.0)
        self.ops = dict.fromkeys(COLUMNS, 0)
        self.plans = 0
        self._begin("trace")

    def _begin(self, stage: str) -> None:
        self._stage = STAGES[stage]
        self._started = time.process_time(), self._count.ops

    def _end(self) -> None:
        seconds, ops = self._started
        self.seconds[self._stage] += time.process_time() - seconds
        self.ops[self._stage] += self._count.ops - ops

    def report(self, stage: str) -> None:
        self._end()
        self._begin(stage)
        self.plans += stage == "verify"

    def counted(self, items: Sequence[Any], word: str) -> Iterator[Any]:
        for item in items:
            self.report(word)
            yield item

    def end(self) -> None:
        """Add what the last stage took."""
        self._end()


class _ClockBesideHost(DeviceClock):
    """A CPU's clock, used as a GPU's is."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.runs = 1

    def host_seconds(self, begin: tuple[float, Any], end: tuple[float, Any]) -> float:
        return end[0] - begin[0]


def measure(name: str, budget: str) -> Stages:
    """Plan one model for a budget twice: once to time it, and once to count its ops."""
    case = FAMILIES[name].case("cpu", is_large=False, is_deep=True)
    count = _Count()
    with count:
        _step(case)
    of_step, step_ms = count.ops, min(_milliseconds(case) for _ in range(5))
    timed, plan = _planned(case, budget, count, counts=False)
    counted, _ = _planned(case, budget, count, counts=True)
    profile = plan.profile
    assert profile is not None
    return Stages(
        name,
        budget,
        len(profile.order),
        len(profile.blocks),
        round(step_ms, 2),
        {stage: round(seconds, 3) for stage, seconds in timed.seconds.items()},
        {stage: round(ops / of_step, 2) for stage, ops in counted.ops.items()},
        timed.plans,
        counted.plans,
    )


def format_stages(results: Sequence[Stages]) -> str:
    """Two lines a model: ops of each stage, and its CPU time, both as multiples of a plain step's.

    What it takes to measure plans is that of one plan.
    """
    rows = []
    for r in results:
        seconds = {stage: taken * 1e3 / r.step_ms for stage, taken in r.seconds.items()}
        for title, of_stages, plans in (
            (f"{r.model} {r.budget}", r.ops, r.plans_counted),
            ("  CPU time", seconds, r.plans),
        ):
            each = of_stages | {PLANS: of_stages[PLANS] / max(plans, 1)}
            cells = [f"{each[stage]:.1f}" for stage in COLUMNS]
            rows.append([title, *cells, str(plans), f"{sum(of_stages.values()):.0f}"])
    return format_table(["plain steps", *COLUMNS, "plans", "in all"], rows)


def _planned(
    case: Case, budget: str, count: _Count, *, counts: bool
) -> tuple[_StageMeter, "rekindle.Plan"]:
    meter = _StageMeter(count)
    with count if counts else nullcontext(), show_progress(meter):
        profile = profile_model(case.model, case.loss, None, _as_beside_a_gpu())
        report_progress("solve")
        plan = rekindle.fit(case.model, case.loss, budget, profile=profile)
    meter.end()
    rekindle.remove(case.model)
    return meter, plan


def _as_beside_a_gpu() -> MeasuringDevice:
    cpu = torch.device("cpu")
    return replace(
        measuring_device(cpu),
        clock=_ClockBesideHost(cpu),
        bytes_per_second=_LINK,
        tier_bytes=2**40,
        host_runs_ahead=True,
    )


def _step(case: Case) -> None:
    case.model.zero_grad(set_to_none=True)
    case.loss().backward()


def _milliseconds(case: Case) -> float:
    start = time.process_time()
    _step(case)
    return (time.process_time() - start) * 1e3
