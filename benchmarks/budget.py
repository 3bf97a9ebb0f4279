"""Budgets and torch's own checkpointing, whole models: `scripts/bench budget --shape all`.

The models are a decoder in two shapes, and a Llama of transformers with its head and loss. Measured
are time and activation peak of a forward and backward, relative to plain eager in the same run, for
torch's full and selective checkpointing, and for rekindle's plans for shares of the plain
activation peak. `rekindle.fit` makes and verifies the plans; predictions stand beside measurements.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median

from torch import Tensor

import rekindle
from benchmarks.command import Result, main
from benchmarks.decoder import Shape, plain
from benchmarks.llama import LLAMA, TINY_LLAMA, LlamaShape, LlamaWorkload
from benchmarks.measure import Timings, format_table, interleaved
from benchmarks.recompute import by_block
from benchmarks.strategies import (
    TORCH_EVERY_SECOND,
    TORCH_SELECTIVE,
    torch_every_second,
    torch_full,
    torch_selective,
)
from benchmarks.workload import Comparison, Forward, Workload
from rekindle.modules.apply_strategies import undo
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.verified_plan import fastest_verified_plan

SHARES = (0.7, 0.6, 0.5, 0.35, 0.2)
LEAST = "rekindle, the least"


@dataclass(frozen=True)
class BudgetResult(Result):
    """One strategy on one shape, with what its plan predicted, if it has one."""

    predicted_time_ratio: float | None
    predicted_peak_ratio: float | None


def in_turns(work: Workload, plan: "rekindle.Plan", seconds: float) -> Timings:
    """Times of steps without a plan and under it, some of each in turns."""
    run = by_block(plain)
    times: Timings = {"plain": [], "planned": []}
    end = time.perf_counter() + seconds
    while not times["planned"] or time.perf_counter() < end:
        for name, taken in times.items():
            if name == "planned":
                rekindle.apply(work.decoder, plan)
            for i in range(_WARM_UP + _STEPS):
                work.synchronize()
                start = time.perf_counter()
                work.step(run)
                work.synchronize()
                if i >= _WARM_UP:
                    taken.append(time.perf_counter() - start)
            undo(work.decoder)
    return times


def timed(work: Workload, strategies: dict[str, Forward], seconds: float) -> Timings:
    candidates = {name: partial(work.step, forward) for name, forward in strategies.items()}
    return interleaved(candidates, seconds=seconds, synchronize=work.synchronize)


_LEARNING = 5
"""Steps after which offload has learnt what it can."""
_WARM_UP, _STEPS = 1, 5


def measure(shape: Shape, device: str, seconds: float) -> tuple[list[BudgetResult], float, float]:
    work = (LlamaWorkload if isinstance(shape, LlamaShape) else Workload)(shape, device)
    comparison = Comparison(work)
    for leaf in work.leaves:
        assert leaf.grad is not None, "the workload made one"
        leaf.grad.zero_()
    start = time.perf_counter()

    def loss() -> Tensor:
        total: Tensor = work.decoder(work.x).sum()
        return total

    profile, step = rekindle.profile(work.decoder, loss), TrainingStep(work.decoder, loss)
    profiled = time.perf_counter() - start
    start = time.perf_counter()
    base = profile.static_bytes
    points = rekindle.frontier(profile, 2)
    plain_time = points[0].plan.plain_time
    plain_peak = points[0].plan.plain_peak - base
    plans = {}
    for share in SHARES:
        limit = base + int(share * plain_peak)
        with suppress(rekindle.BudgetError):  # too little
            plans[f"rekindle, {share}"] = fastest_verified_plan(step, profile, limit)
    plans[LEAST] = points[-1].plan
    solved = time.perf_counter() - start
    print(profile)
    for name, plan in plans.items():
        print(name, plan)
    theirs: dict[str, Forward] = {
        "plain": by_block(plain),
        "torch": by_block(torch_full),
        TORCH_SELECTIVE: by_block(torch_selective),
        TORCH_EVERY_SECOND: by_block(torch_every_second),
    }
    share = seconds / (1 + len(plans))
    times = timed(work, theirs, share)
    ratios = {name: median(taken) / median(times["plain"]) for name, taken in times.items()}
    identical = {name: comparison.is_identical(run) for name, run in theirs.items()}
    peaks = {name: work.peak(run) for name, run in theirs.items()}
    for name, plan in plans.items():  # one at a time, as in training: offload learns its step
        rekindle.apply(work.decoder, plan)
        run = by_block(plain)
        for _ in range(_LEARNING):
            work.step(run)
        identical[name] = comparison.is_identical(run)
        peaks[name] = work.peak(run)
        undo(work.decoder)
        pair = in_turns(work, plan, share)
        times[name] = pair["planned"]
        ratios[name] = median(pair["planned"]) / median(pair["plain"])
    top = peaks["plain"]
    found = []
    for name, taken in times.items():
        peak, chosen = peaks[name], plans.get(name)
        found.append(
            BudgetResult(
                shape=shape.name,
                strategy=name,
                milliseconds=round(median(taken) * 1e3, 3),
                time_ratio=round(ratios[name], 3),
                peak_mib=None if peak is None else round(peak / 2**20, 1),
                peak_ratio=None if peak is None or top is None else round(peak / top, 3),
                predicted_time_ratio=None
                if chosen is None
                else round(chosen.predicted_time / plain_time, 3),
                predicted_peak_ratio=None
                if chosen is None
                else round((chosen.predicted_peak - base) / plain_peak, 3),
                gradients_identical=identical[name],
                rounds=len(taken),
            )
        )
    return found, profiled, solved


def format_results(results: list[BudgetResult]) -> str:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    rows = [
        [
            r.strategy,
            f"{r.milliseconds:.2f}",
            shown(r.time_ratio),
            shown(r.predicted_time_ratio),
            shown(r.peak_ratio),
            shown(r.predicted_peak_ratio),
            "yes" if r.gradients_identical else "no",
        ]
        for r in results
    ]
    heads = ["strategy", "ms", "time", "predicted", "peak", "predicted", "gradients identical"]
    return format_table(heads, rows)


def measured(shape: Shape, device: str, seconds: float) -> tuple[str, list[BudgetResult]]:
    found, profiled, solved = measure(shape, device, seconds)
    times = f"profiled in {profiled:.1f} s, solved and tried out in {solved:.1f} s"
    return f"{times}\n{format_results(found)}", found


if __name__ == "__main__":
    about = "Budgets against torch's own checkpointing."
    main("budget", about, measured, ["8b", "1b", "llama"], 12.0, {"llama": (LLAMA, TINY_LLAMA)})
