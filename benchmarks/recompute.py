"""Full recompute of every layer, whole decoder: `scripts/bench recompute --shape all`.

Time and activation peak of a forward and backward, relative to plain eager in the same run. Time
is wall clock from an idle device to an idle device, so it holds the host's part: `small` is made of
little else. The peak is what the allocator reached above what it held before the forward
(parameters, their gradients, the input); gradients exist before and are added to. On a CPU there is
no such counter and the model is float32: a smoke test of this file, for the shape `tiny`.

Gradients are compared with plain eager's bit for bit, in steps of their own with deterministic
algorithms on, because attention's usual backward kernel does not even repeat itself. The row
`plain` compares plain eager with plain eager: a "no" there makes the others meaningless.
"""

import argparse
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.decoder import SHAPES, Decoder, RunBlock, Shape, plain
from benchmarks.measure import Timings, environment, format_table, interleaved, save_json
from benchmarks.strategies import REKINDLE, TORCH

STRATEGIES: dict[str, RunBlock] = {"plain": plain} | TORCH | REKINDLE


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


class Workload:
    """A decoder with its batch, ready to be stepped: a forward and a backward, no optimizer."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape = shape
        self.device = device
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(0)
        self.decoder = Decoder(shape, device=device, dtype=dtype)
        self.x = shape.hidden_states(device=device, dtype=dtype).requires_grad_()
        self.grad = shape.hidden_states(device=device, dtype=dtype)
        self.leaves: list[Tensor] = [self.x, *self.decoder.parameters()]
        for leaf in self.leaves:
            leaf.grad = torch.zeros_like(leaf)

    def step(self, run: RunBlock) -> None:
        self.decoder(self.x, run).backward(self.grad)

    def gradients(self, run: RunBlock) -> list[Tensor]:
        """The gradients of one step, valid until the next."""
        for leaf in self.leaves:
            if leaf.grad is not None:
                leaf.grad.zero_()
        self.step(run)
        return [leaf.grad for leaf in self.leaves if leaf.grad is not None]

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure_times(work: Workload, seconds: float) -> Timings:
    def stepping(run: RunBlock) -> Callable[[], None]:
        return lambda: work.step(run)

    candidates = {name: stepping(run) for name, run in STRATEGIES.items()}
    return interleaved(candidates, seconds=seconds, synchronize=work.synchronize)


def measure_peak(work: Workload, run: RunBlock) -> int | None:
    """Bytes that one step reaches above what is allocated before it; after a warm-up."""
    if work.device != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work.step(run)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def compare_gradients(work: Workload) -> dict[str, bool]:
    """For each strategy: is every gradient the one of a first plain step, bit for bit?"""
    with deterministic_algorithms():
        expected = [grad.clone() for grad in work.gradients(plain)]
        return {
            name: all(map(same_bits, work.gradients(run), expected))
            for name, run in STRATEGIES.items()
        }


def measure(shape: Shape, device: str, seconds: float) -> list[Result]:
    work = Workload(shape, device)
    identical = compare_gradients(work)
    times = measure_times(work, seconds)
    peaks = {name: measure_peak(work, run) for name, run in STRATEGIES.items()}
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
