"""Fates in compiled layers of a decoder: `scripts/bench compiled --shape all`.

Every layer is compiled alone, as training code does it. Each way to run it is compared with plain
compiled layers in the same run, and stands beside torch's own; `workload` says what the peak is.
Gradients are compared with those of plain compiled layers, in steps with deterministic algorithms
on: whether they are the same bit for bit, and the largest difference relative to the largest
gradient of the same parameter. A recomputed layer is another graph, which inductor may fuse
otherwise: then they are close, not the same, and torch's are as close.

Torch has no public way to offload inside a graph; `save_on_cpu` is its way around one. On a CPU
the backend is `aot_eager`, a smoke test for the shape `tiny`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import rekindle
from benchmarks.command import Result, main
from benchmarks.decoder import Decoder, RunBlock, Shape, plain
from benchmarks.measure import format_table, interleaved
from benchmarks.strategies import (
    rekindle_full,
    rekindle_selective,
    torch_full,
    torch_selective,
)
from benchmarks.workload import Forward, Workload, deterministic_algorithms, same_bits
from rekindle import policies

OFFLOADING = policies.at("mlp", policies.offload(policies.MATMULS)) | (
    policies.keep_matmuls_and_attention
)
"""Keep what takes compute, the large results of the MLP in host memory."""


def rekindle_selective_offload(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out: Tensor = rekindle.checkpoint(block, x, context_fn=OFFLOADING)
    return out


COMPILED: dict[str, RunBlock] = {
    "compiled": plain,
    "torch": torch_full,
    "rekindle": rekindle_full,
    "torch, keep matmuls and attention": torch_selective,
    "rekindle, keep matmuls and attention": rekindle_selective,
    "rekindle, the same with the MLP offloaded": rekindle_selective_offload,
}
"""What is compiled with each layer, as one graph."""
AROUND: dict[str, Callable[[], Any]] = {
    "save_on_cpu around compiled layers": partial(save_on_cpu, pin_memory=True),
    "rekindle.offload() around compiled layers": rekindle.offload,
    "rekindle.offload(quota=1.0) around them": partial(rekindle.offload, quota=1.0),
}
"""What plain compiled layers run inside of."""
PLAIN = "compiled"


def layers(decoder: Decoder, run: RunBlock, backend: str) -> list[Callable[[Tensor], Tensor]]:
    """The layers of a decoder, each run by a strategy and compiled as one graph."""
    return [
        torch.compile(_Layer(block, run), backend=backend, fullgraph=True, dynamic=False)
        for block in decoder.blocks
    ]


class _Layer(nn.Module):
    """A block and how it is run: every one has the same code, so they share a graph."""

    def __init__(self, block: nn.Module, run: RunBlock) -> None:
        super().__init__()
        self.block = block
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.block, x)


def forwards(work: Workload) -> dict[str, Forward]:
    """Every way to run the decoder, by its name; `plain eager` is not compiled."""
    backend = "inductor" if work.device == "cuda" else "aot_eager"
    found: dict[str, Forward] = {"plain eager": lambda decoder, x: decoder(x)}
    for name, run in COMPILED.items():
        found[name] = _inside(nullcontext, layers(work.decoder, run, backend))
    for name, context in AROUND.items():
        found[name] = _inside(context, layers(work.decoder, plain, backend))
    return found


def _inside(context: Callable[[], Any], steps: list[Callable[[Tensor], Tensor]]) -> Forward:
    def forward(_: Decoder, x: Tensor) -> Tensor:
        with context():
            for step in steps:
                x = step(x)
            return x

    return forward


@dataclass(frozen=True)
class CompiledResult(Result):
    """One way on one shape."""

    largest_difference: float


class Comparison:
    """Plain compiled layers' gradients, to compare others with."""

    def __init__(self, work: Workload, forward: Forward) -> None:
        self._work = work
        with deterministic_algorithms():
            self._expected = [grad.clone() for grad in work.gradients(forward)]

    def of(self, forward: Forward) -> tuple[bool, float]:
        """Whether gradients are the same bit for bit, and how far they are apart."""
        with deterministic_algorithms():
            found = self._work.gradients(forward)
        is_identical = all(map(same_bits, found, self._expected))
        apart = (
            float((one.float() - other.float()).abs().max() / other.float().abs().max())
            for one, other in zip(found, self._expected, strict=True)
        )
        return is_identical, max(apart)


def measure(shape: Shape, device: str, seconds: float) -> list[CompiledResult]:
    work = Workload(shape, device)
    ways = forwards(work)
    for forward in ways.values():  # compile, and let offload learn
        for _ in range(4):
            work.step(forward)
    comparison = Comparison(work, ways[PLAIN])
    compared = {name: comparison.of(forward) for name, forward in ways.items()}
    times = interleaved(
        {name: partial(work.step, forward) for name, forward in ways.items()},
        seconds=seconds,
        synchronize=work.synchronize,
    )
    peaks = {name: work.peak(forward) for name, forward in ways.items()}
    plain_peak = peaks[PLAIN]
    results = []
    for name, taken in times.items():
        peak, (is_identical, apart) = peaks[name], compared[name]
        ratio = None if peak is None or plain_peak is None else round(peak / plain_peak, 3)
        results.append(
            CompiledResult(
                shape=shape.name,
                strategy=name,
                milliseconds=round(median(taken) * 1e3, 3),
                time_ratio=round(median(taken) / median(times[PLAIN]), 3),
                peak_mib=None if peak is None else round(peak / 2**20, 1),
                peak_ratio=ratio,
                gradients_identical=is_identical,
                largest_difference=round(apart, 6),
                rounds=len(taken),
            )
        )
    return results


def format_results(results: list[CompiledResult]) -> str:
    header = ["strategy", "ms", "time ratio", "peak MiB", "peak ratio", "gradients", "apart"]
    rows = [
        [
            result.strategy,
            f"{result.milliseconds:.2f}",
            f"{result.time_ratio:.2f}",
            "-" if result.peak_mib is None else f"{result.peak_mib:.0f}",
            "-" if result.peak_ratio is None else f"{result.peak_ratio:.2f}",
            "identical" if result.gradients_identical else "close",
            f"{result.largest_difference:.1e}",
        ]
        for result in results
    ]
    return format_table(header, rows)


def measured(shape: Shape, device: str, seconds: float) -> tuple[str, list[CompiledResult]]:
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64):  # all ways share the layer's code
        found = measure(shape, device, seconds)
    return format_results(found), found


if __name__ == "__main__":
    main("compiled", "Fates in compiled layers of a decoder.", measured, ["8b", "1b"], 20.0)
