"""Strategies in compiled layers of a decoder: `scripts/bench compiled --shape all`.

Every layer is compiled alone, as training code does it. Each strategy is compared with plain
compiled layers in the same run, and with torch's own; `workload` says what the peak is. Gradients
are compared with those of plain compiled layers, in steps with deterministic algorithms on: whether
they are the same bit for bit, and the largest difference relative to the largest gradient of the
same parameter. A recomputed layer is another graph, which inductor may fuse differently: then
gradients are close, not the same, and torch's are as close.

Torch's `activation_memory_budget` compiles each layer at a share of what it would save, and
`rekindle.fit` plans the layers for a share of the activations' peak of plain compiled layers, with
offload; what its plans predict stands beside what was measured.

Torch cannot offload inside a graph, and its `save_on_cpu` fails around these layers: it gives
tensors back to the graph with other strides. On a CPU the backend is `aot_eager`, a smoke test for
the shape `tiny`.
"""

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as functorch_config

import rekindle
from benchmarks.command import Result, main
from benchmarks.decoder import Decoder, RunBlock, Shape, plain
from benchmarks.measure import Timings, format_table, interleaved
from benchmarks.offload import bandwidth
from benchmarks.strategies import (
    rekindle_full,
    rekindle_selective,
    torch_full,
    torch_selective,
)
from benchmarks.workload import Forward, Workload, deterministic_algorithms, same_bits
from rekindle import CheckpointPolicy, policies


def _if_free(_ctx: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    policy = CheckpointPolicy
    return policy.PREFER_CPU_OFFLOAD if is_product else policy.PREFER_RECOMPUTE


OFFLOADING = policies.at("mlp", policies.offload(policies.MATMULS)) | (
    policies.keep_matmuls_and_attention
)
"""Keep what takes compute, the large results of the MLP in host memory."""


IF_FREE = policies.at("mlp", policies.of(_if_free)) | policies.keep_matmuls_and_attention
"""The same, as much of it as costs no time."""
ALL_AWAY = policies.offload(policies.MATMULS, policies.ATTENTION)
"""What takes compute goes to host memory."""


def rekindle_selective_offload(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out: Tensor = rekindle.checkpoint(block, x, context_fn=OFFLOADING)
    return out


def rekindle_if_free(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out: Tensor = rekindle.checkpoint(block, x, context_fn=IF_FREE)
    return out


def rekindle_all_away(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out: Tensor = rekindle.checkpoint(block, x, context_fn=ALL_AWAY)
    return out


COMPILED: dict[str, RunBlock] = {
    "compiled": plain,
    "torch": torch_full,
    "rekindle": rekindle_full,
    "torch, keep matmuls and attention": torch_selective,
    "rekindle, keep matmuls and attention": rekindle_selective,
    "rekindle, the same with the MLP offloaded": rekindle_selective_offload,
    "rekindle, as much of the MLP offloaded as costs no time": rekindle_if_free,
    "rekindle, all that is kept offloaded": rekindle_all_away,
}
"""What is compiled with each layer, as one graph."""
AROUND: dict[str, tuple[Callable[[], Any], RunBlock]] = {
    "rekindle.offload() around compiled layers": (rekindle.offload, plain),
    "rekindle.offload(quota=1.0) around them": (partial(rekindle.offload, quota=1.0), plain),
    "rekindle.offload() around layers that keep matmuls and attention": (
        rekindle.offload,
        rekindle_selective,
    ),
}
"""What compiled layers run inside of, and what is compiled with each."""
PLAIN = "compiled"
_KEPT = "rekindle, keep matmuls and attention"
WITHOUT_OFFLOAD = {
    "rekindle, the same with the MLP offloaded": _KEPT,
    "rekindle, as much of the MLP offloaded as costs no time": _KEPT,
    "rekindle, all that is kept offloaded": _KEPT,
    "rekindle.offload() around compiled layers": PLAIN,
    "rekindle.offload(quota=1.0) around them": PLAIN,
    "rekindle.offload() around layers that keep matmuls and attention": _KEPT,
}
"""What a way that offloads is compared with to see how much of the copying shows."""


TORCH_BUDGETS = (0.75, 0.5, 0.25, 0.1, 0.0)
"""Shares of what a layer saves, for torch's own partitioner."""
SHARES = (70, 50, 35, 20, 12)
"""Shares of the activations' peak of compiled layers, in percent, that plans are made for."""


@dataclass(eq=False)
class TorchBudget:
    """A backend whose graphs torch's partitioner makes at a memory budget."""

    backend: str
    budget: float

    def __post_init__(self) -> None:
        self.__name__ = f"{self.backend} at {self.budget}"

    def __call__(self, graph: Any, inputs: Any) -> Any:
        compiler: Any = lookup_backend(self.backend)
        with functorch_config.patch(activation_memory_budget=self.budget):
            return compiler(graph, inputs)


def layers(decoder: Decoder, run: RunBlock, backend: Any) -> list[Callable[[Tensor], Tensor]]:
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
    for name, (context, run) in AROUND.items():
        found[name] = _inside(context, layers(work.decoder, run, backend))
    return found


def torch_budgets(work: Workload, backend: str) -> dict[str, Forward]:
    """The decoder with its layers compiled at torch's budgets, by names of rows."""
    return {
        f"torch, budget {budget:g}": _inside(
            nullcontext, layers(work.decoder, plain, TorchBudget(backend, budget))
        )
        for budget in TORCH_BUDGETS
    }


@dataclass(frozen=True)
class Fitted:
    """Plans for the decoder with compiled layers."""

    forwards: dict[str, Forward]
    plans: dict[str, rekindle.Plan]
    seconds: float
    """Seconds of the profile, in which all candidates are compiled."""


def fitted(work: Workload, backend: str, shares: Sequence[int] = SHARES) -> Fitted:
    """The decoder fitted to shares of the plain peak, on copies that share its parameters."""

    def compiled_copy() -> Decoder:
        own = {id(parameter): parameter for parameter in work.decoder.parameters()}
        decoder: Decoder = copy.deepcopy(work.decoder, own)
        for block in decoder.blocks:
            block.compile(backend=backend, fullgraph=True, dynamic=False)
        return decoder

    def loss(decoder: Decoder) -> Tensor:
        total: Tensor = decoder(work.x).sum()
        return total

    decoder = compiled_copy()
    start = time.perf_counter()
    profile = rekindle.profile(decoder, partial(loss, decoder))
    found = Fitted({}, {}, time.perf_counter() - start)
    for share in shares:
        decoder = compiled_copy()
        with suppress(rekindle.BudgetError):
            plan = rekindle.fit(decoder, partial(loss, decoder), f"{share}%", profile=profile)
            name = f"rekindle.fit, {share} %"
            found.plans[name] = plan
            found.forwards[name] = partial(_on_copy, decoder)
    return found


def _on_copy(decoder: Decoder, _: Decoder, x: Tensor) -> Tensor:
    out: Tensor = decoder(x)
    return out


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
    gib_moved: float
    hidden: float | None
    """How much of the time of copying, both ways one after the other, the step does not show."""
    predicted_milliseconds: float | None = None
    predicted_peak_mib: float | None = None
    """As `peak_mib`, without what is there all the time."""


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
    backend = "inductor" if device == "cuda" else "aot_eager"
    planned = fitted(work, backend)
    print(f"profile of compiled layers: {planned.seconds:.1f} s")
    ways = forwards(work) | torch_budgets(work, backend) | planned.forwards
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
    moved = {name: _bytes_moved(work, forward) for name, forward in ways.items()}
    rate = bandwidth() if device == "cuda" else None
    plain_peak = peaks[PLAIN]
    results = []
    for name, taken in times.items():
        peak, (is_identical, apart) = peaks[name], compared[name]
        plan = planned.plans.get(name)
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
                gib_moved=round(moved[name] / 2**30, 2),
                hidden=_hidden(name, times, moved[name], rate),
                rounds=len(taken),
                predicted_milliseconds=plan and round(plan.predicted_time * 1e3, 3),
                predicted_peak_mib=plan and round(_activations(plan) / 2**20, 1),
            )
        )
    return results


def _activations(plan: "rekindle.Plan") -> int:
    """The predicted peak of a plan above what is there all the time."""
    static = plan.profile.static_bytes if plan.profile is not None else 0
    return plan.predicted_peak - static


def _bytes_moved(work: Workload, forward: Forward) -> int:
    """What one step sends to host memory."""
    with rekindle.observe() as seen:
        work.step(forward)
    return seen.offload.bytes_out


def _hidden(name: str, times: Timings, moved: int, rate: float | None) -> float | None:
    if not moved or rate is None or name not in WITHOUT_OFFLOAD:
        return None
    shown = median(times[name]) - median(times[WITHOUT_OFFLOAD[name]])
    return round(1 - shown / (2 * moved / rate), 2)


def format_results(results: list[CompiledResult]) -> str:
    header = ["strategy", "ms", "time ratio", "peak MiB", "peak ratio", "gradients", "apart"]
    header += ["GiB moved", "hidden", "predicted ms", "predicted MiB"]
    rows = [
        [
            result.strategy,
            f"{result.milliseconds:.2f}",
            f"{result.time_ratio:.2f}",
            "-" if result.peak_mib is None else f"{result.peak_mib:.0f}",
            "-" if result.peak_ratio is None else f"{result.peak_ratio:.2f}",
            "identical" if result.gradients_identical else "close",
            f"{result.largest_difference:.1e}",
            f"{result.gib_moved:.1f}",
            "-" if result.hidden is None else f"{result.hidden:.2f}",
            *(
                "-" if predicted is None else f"{predicted:.1f}"
                for predicted in (result.predicted_milliseconds, result.predicted_peak_mib)
            ),
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
    main("compiled", "Strategies in compiled layers of a decoder.", measured, ["8b", "1b"], 20.0)
