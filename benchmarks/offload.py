"""Activations offloaded from a whole decoder: `scripts/bench offload --shape all`, on a GPU.

Each strategy is timed in turn with plain eager, step by step, and compared with the plain steps of
its own rounds. Beside time and peak, the results have the bytes copied each way, the bytes derived
instead, how long the device waited, and the pinned memory. `over the link` is the step's time,
divided by the larger of the plain time and the time of the bytes of both directions at the
bandwidth measured in the same run: no strategy that moves as many bytes could be below 1.0 if
copies in both directions came one after the other.
"""

import argparse
import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import rekindle
from benchmarks.decoder import SHAPES, Decoder, Shape
from benchmarks.measure import environment, format_table, interleaved, save_json
from benchmarks.workload import Comparison, Forward, Workload, plain
from rekindle.offload.owners import forget_unowned

_WARM_UP = 4
"""Steps before anything is measured; the engine learns in the first three."""


@dataclass(frozen=True)
class Result:
    """One strategy on one shape."""

    shape: str
    strategy: str
    milliseconds: float
    time_ratio: float
    peak_mib: float
    peak_ratio: float
    gib_out: float
    gib_in: float
    gib_derived: float
    ms_waited: float
    prefetch_hits: int
    prefetch_misses: int
    pool_gib_after_2_steps: float
    pool_gib: float
    link_ratio: float
    first_step_seconds: float
    gradients_identical: bool
    rounds: int


def inside(context: Callable[[], AbstractContextManager[object]]) -> Forward:
    """The forward that runs inside a context."""

    def forward(decoder: Decoder, x: Tensor) -> Tensor:
        with context():
            return plain(decoder, x)

    return forward


OFFLOADS = {
    "auto": rekindle.offload(),
    "auto, nothing derived": rekindle.offload(derive=False),
    **{f"share {share}": rekindle.offload(quota=share) for share in (0.25, 0.5, 1.0)},
}
STRATEGIES: dict[str, Forward] = {
    "plain": plain,
    "save_on_cpu": inside(partial(save_on_cpu, pin_memory=True)),
    **{name: inside(lambda offload=offload: offload) for name, offload in OFFLOADS.items()},
}


def bandwidth() -> float:
    """Bytes per second of one direction to pinned memory, while the other is busy too."""
    size = 512 * 2**20
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in streams]
    device = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in streams]
    rates = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = perf_counter()
        with torch.cuda.stream(streams[0]):
            host[0].copy_(device[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            device[1].copy_(host[1], non_blocking=True)
        torch.cuda.synchronize()
        rates.append(size / (perf_counter() - start))
    return median(rates)


def measure_one(
    name: str, forward: Forward, work: Workload, comparison: Comparison, seconds: float
) -> Result:
    rate = bandwidth()
    with rekindle.observe() as early:
        start = perf_counter()
        work.step(forward)
        work.synchronize()
        first = perf_counter() - start
        work.step(forward)
    for _ in range(_WARM_UP - 2):
        work.step(forward)
    times = interleaved(
        {"plain": partial(work.step, plain), name: partial(work.step, forward)},
        seconds=seconds,
        synchronize=work.synchronize,
    )
    took, plain_took = median(times[name]), median(times["plain"])
    peak, plain_peak = work.peak(forward), work.peak(plain)
    assert peak is not None, "this benchmark needs a GPU"
    assert plain_peak is not None, "this benchmark needs a GPU"
    with rekindle.observe() as seen:
        work.step(forward)
        work.synchronize()
    traffic = seen.offload
    at_best = max(plain_took, (traffic.bytes_out + traffic.bytes_in) / rate)
    return Result(
        shape=work.shape.name,
        strategy=name,
        milliseconds=round(took * 1e3, 2),
        time_ratio=round(took / plain_took, 3),
        peak_mib=round(peak / 2**20, 1),
        peak_ratio=round(peak / plain_peak, 3),
        gib_out=round(traffic.bytes_out / 2**30, 2),
        gib_in=round(traffic.bytes_in / 2**30, 2),
        gib_derived=round(traffic.bytes_derived / 2**30, 2),
        ms_waited=round(traffic.seconds_waited * 1e3, 2),
        prefetch_hits=traffic.prefetch_hits,
        prefetch_misses=traffic.prefetch_misses,
        pool_gib_after_2_steps=round(early.offload.pool_bytes / 2**30, 2),
        pool_gib=round(traffic.pool_bytes / 2**30, 2),
        link_ratio=round(took / at_best, 3),
        first_step_seconds=round(first, 2),
        gradients_identical=comparison.is_identical(forward),
        rounds=len(times[name]),
    )


def measure(shape: Shape, seconds: float) -> list[Result]:
    forget_unowned()  # so that nothing was learnt from another shape
    work = Workload(shape, "cuda")
    comparison = Comparison(work)
    results = []
    for name, forward in STRATEGIES.items():
        results.append(measure_one(name, forward, work, comparison, seconds))
        print(f"{shape.name}: {results[-1]}", flush=True)
        gc.collect()
        if name in OFFLOADS:
            OFFLOADS[name].trim()
        torch._C._host_emptyCache()  # what save_on_cpu pinned
    return results


def format_results(results: list[Result]) -> str:
    header = [
        "strategy",
        "ms",
        "time ratio",
        "peak MiB",
        "peak ratio",
        "GiB out",
        "GiB in",
        "GiB derived",
        "ms waited",
        "pinned GiB",
        "over the link",
        "gradients identical",
    ]
    rows = [
        [
            result.strategy,
            f"{result.milliseconds:.1f}",
            f"{result.time_ratio:.2f}",
            f"{result.peak_mib:.0f}",
            f"{result.peak_ratio:.2f}",
            *_traffic(result),
            "yes" if result.gradients_identical else "no",
        ]
        for result in results
    ]
    return format_table(header, rows)


def _traffic(result: Result) -> list[str]:
    if result.strategy not in OFFLOADS:  # nobody counts for it
        return ["-"] * 6
    return [
        f"{result.gib_out:.1f}",
        f"{result.gib_in:.1f}",
        f"{result.gib_derived:.1f}",
        f"{result.ms_waited:.1f}",
        f"{result.pool_gib:.1f}",
        f"{result.link_ratio:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Activations offloaded, against plain eager.")
    parser.add_argument("--shape", choices=["8b", "1b", "all"], default="8b", help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    parser.add_argument("--seconds", type=float, default=6.0, help="per strategy (%(default)s)")
    options = parser.parse_args()

    # cuBLAS reads this when it starts, and has no deterministic mode without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    print(", ".join(f"{key} {value}" for key, value in environment("cuda").items()))
    results: list[Result] = []
    for name in ["8b", "1b"] if options.shape == "all" else [options.shape]:
        found = measure(SHAPES[name], options.seconds)
        print(f"\n{SHAPES[name]}, {found[0].rounds} rounds\n{format_results(found)}", flush=True)
        results += found
    if options.json:
        save_json(options.json, "offload", [asdict(result) for result in results], "cuda")


if __name__ == "__main__":
    main()
