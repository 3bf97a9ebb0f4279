"""Recompute in every layer of a decoder, all or some of it: `scripts/bench recompute --shape all`.

Measured are time and activation peak of a forward and backward, relative to plain eager in the same
run. Time is wall clock from an idle device to an idle device, so it includes host time: the shape
`small` is host-bound. `workload` says what the peak is and how gradients are compared; the row
`plain` compares plain eager with plain eager: a "no" there makes the other rows meaningless.
"""

from functools import partial
from statistics import median

from benchmarks.command import Result, main
from benchmarks.decoder import RunBlock, Shape, plain
from benchmarks.measure import Timings, format_table, interleaved
from benchmarks.strategies import REKINDLE, SELECTIVE, TORCH
from benchmarks.workload import Comparison, Forward, Workload


def by_block(run: RunBlock) -> Forward:
    """The forward in which every block is run by a strategy."""
    return lambda decoder, x: decoder(x, run)


RUNS = {"plain": plain} | TORCH | REKINDLE | SELECTIVE
STRATEGIES = {name: by_block(run) for name, run in RUNS.items()}


def measure_times(work: Workload, seconds: float) -> Timings:
    candidates = {name: partial(work.step, forward) for name, forward in STRATEGIES.items()}
    return interleaved(candidates, seconds=seconds, synchronize=work.synchronize)


def measure(shape: Shape, device: str, seconds: float) -> list[Result]:
    work = Workload(shape, device)
    comparison = Comparison(work)
    identical = {name: comparison.is_identical(run) for name, run in STRATEGIES.items()}
    times = measure_times(work, seconds)
    peaks = {name: work.peak(run) for name, run in STRATEGIES.items()}
    plain_peak = peaks["plain"]
    results = []
    for name, taken in times.items():
        peak = peaks[name]
        ratio = None if peak is None or plain_peak is None else round(peak / plain_peak, 3)
        results.append(
            Result(
                shape=shape.name,
                strategy=name,
                milliseconds=round(median(taken) * 1e3, 3),
                time_ratio=round(median(taken) / median(times["plain"]), 3),
                peak_mib=None if peak is None else round(peak / 2**20, 1),
                peak_ratio=ratio,
                gradients_identical=identical[name],
                rounds=len(taken),
            )
        )
    return results


def format_results(results: list[Result]) -> str:
    header = [
        "strategy",
        "ms",
        "time ratio",
        "peak MiB",
        "peak ratio",
        "gradients identical",
    ]
    rows = [
        [
            result.strategy,
            f"{result.milliseconds:.2f}",
            f"{result.time_ratio:.2f}",
            "-" if result.peak_mib is None else f"{result.peak_mib:.0f}",
            "-" if result.peak_ratio is None else f"{result.peak_ratio:.2f}",
            "yes" if result.gradients_identical else "no",
        ]
        for result in results
    ]
    return format_table(header, rows)


def measured(shape: Shape, device: str, seconds: float) -> tuple[str, list[Result]]:
    found = measure(shape, device, seconds)
    return format_results(found), found


if __name__ == "__main__":
    about = "Recompute per layer against plain eager."
    main("recompute", about, measured, ["8b", "1b", "small"], 15.0)
