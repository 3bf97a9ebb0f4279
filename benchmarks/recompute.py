"""Recompute in every layer of a decoder, all or some of it: `scripts/bench recompute --shape all`.

Time and activation peak of a forward and backward, relative to plain eager in the same run. Time
is wall clock from an idle device to an idle device, so it holds the host's part: `small` is made of
little else. `workload` says what the peak is and how gradients are compared; the row `plain`
compares plain eager with plain eager: a "no" there makes the others meaningless.
"""

import argparse
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.decoder import SHAPES, RunBlock, Shape, plain
from benchmarks.measure import Timings, environment, format_table, interleaved, save_json
from benchmarks.strategies import REKINDLE, SELECTIVE, TORCH
from benchmarks.workload import Comparison, Forward, Workload


def by_block(run: RunBlock) -> Forward:
    """The forward in which every block is run by a strategy."""
    return lambda decoder, x: decoder(x, run)


RUNS = {"plain": plain} | TORCH | REKINDLE | SELECTIVE
STRATEGIES = {name: by_block(run) for name, run in RUNS.items()}


@dataclass(frozen=True)
class Result:
    """One strategy on one shape."""

    shape: str
    strategy: str
    milliseconds: float
    time_ratio: float
    peak_mib: float | None
    peak_ratio: float | None
    gradients_identical: bool
    rounds: int


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Full recompute per layer against plain eager.")
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="tiny", help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each shape (%(default)s)")
    options = parser.parse_args()

    # cuBLAS reads this when it starts, and has no deterministic mode without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = ["8b", "1b", "small"] if options.shape == "all" else [options.shape]
    if device == "cpu" and names != ["tiny"]:
        parser.error("without a GPU only --shape tiny can be measured")
    if device == "cpu":
        torch.set_num_threads(1)

    print(", ".join(f"{key} {value}" for key, value in environment(device).items()))
    results: list[Result] = []
    for name in names:
        found = measure(SHAPES[name], device, options.seconds)
        print(f"\n{SHAPES[name]}, {found[0].rounds} rounds\n{format_results(found)}", flush=True)
        results += found
    if options.json:
        save_json(options.json, "recompute", [asdict(result) for result in results], device)


if __name__ == "__main__":
    main()
