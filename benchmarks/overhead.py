"""Host time that a checkpointed region costs: `scripts/bench overhead [--json PATH]`.

On tiny tensors a region's time is almost all Python and dispatch, as in a host-bound step on a GPU.
The cost is the time of a checkpointed forward and backward beyond the work of recomputing: two
plain forwards and one plain backward of the same function, timed in the same round. The cost grows
with the number of tensors that the region saves, so three regions are shown. A replay that stops
early does a little less than the second forward, which counts in its favour; so do the selective
rows, which recompute only the cheap ops.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor, nn

from benchmarks.decoder import SHAPES, Block, RunBlock, plain
from benchmarks.measure import Timings, format_table, interleaved, save_json
from benchmarks.strategies import REKINDLE, SELECTIVE, TORCH, TORCH_SELECTIVE, installed_peers

STRATEGIES = TORCH | installed_peers() | REKINDLE | SELECTIVE
FLOOR = "two forwards, one backward"
BARE = "bare call"

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Cost:
    """What one region costs: the median over rounds and its quartiles, in microseconds."""

    median_us: float
    quartiles_us: tuple[float, float]
    ratio: float
    """Of the medians, to torch's non-reentrant; of a selective one, to torch's selective."""
    rounds: int


def function(x: Tensor) -> Tensor:
    """Four pointwise ops, each of which saves something, and no module."""
    return (x.sin() * x.exp()).tanh()


def regions() -> dict[str, tuple[Function, Tensor]]:
    """The measured functions, each with its input."""
    tiny = SHAPES["tiny"]
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    block = Block(tiny, dtype=torch.float32)
    return {
        "function": (function, torch.randn(4, 8)),
        "mlp": (mlp, torch.randn(4, 8)),
        "block": (block, tiny.hidden_states(dtype=torch.float32)),
    }


def training(run: RunBlock, function: Function, x: Tensor, grad: Tensor) -> Callable[[], None]:
    return lambda: run(function, x).backward(grad)


def floor(function: Function, x: Tensor, grad: Tensor) -> Callable[[], None]:
    def call() -> None:
        out = function(x)
        function(x)
        out.backward(grad)

    return call


def measure_training(function: Function, x: Tensor, seconds: float) -> Timings:
    """Per round and strategy, seconds of a forward and backward over those of the floor."""
    x.requires_grad_()
    grad = torch.ones_like(x)
    candidates = {FLOOR: floor(function, x, grad)} | {
        name: training(run, function, x, grad) for name, run in STRATEGIES.items()
    }
    return over(FLOOR, interleaved(candidates, seconds=seconds, calls=5, warmup=20))


def measure_no_grad(function: Function, x: Tensor, seconds: float) -> Timings:
    """Per round, seconds of a region under `no_grad` over those of a bare call."""
    x.requires_grad_()

    def calling(run: RunBlock) -> Callable[[], object]:
        return lambda: run(function, x)

    runs = {BARE: plain, "torch": TORCH["torch"], "rekindle": REKINDLE["rekindle"]}
    candidates = {name: calling(run) for name, run in runs.items()}
    with torch.no_grad():
        return over(BARE, interleaved(candidates, seconds=seconds, calls=50, warmup=20))


def over(base: str, timings: Timings) -> Timings:
    """What each candidate took more than `base`, round by round."""
    return {
        name: [mine - common for mine, common in zip(taken, timings[base], strict=True)]
        for name, taken in timings.items()
        if name != base
    }


def summary(costs: Timings) -> dict[str, Cost]:
    def base(name: str) -> float:
        return median(costs[TORCH_SELECTIVE if name in SELECTIVE else "torch"])

    return {
        name: Cost(
            median_us=round(median(taken) * 1e6, 2),
            quartiles_us=(
                round(quantiles(taken)[0] * 1e6, 2),
                round(quantiles(taken)[2] * 1e6, 2),
            ),
            ratio=round(median(taken) / base(name), 3),
            rounds=len(taken),
        )
        for name, taken in costs.items()
    }


def format_training(results: dict[str, dict[str, Cost]]) -> str:
    header = ["µs over the recompute floor"]
    for region in results:
        header += [region, "ratio"]
    rows = []
    for name in STRATEGIES:
        row = [name]
        for costs in results.values():
            row += [f"{costs[name].median_us:.1f}", f"{costs[name].ratio:.2f}"]
        rows.append(row)
    return format_table(header, rows)


def format_no_grad(costs: dict[str, Cost]) -> str:
    rows = [[name, f"{cost.median_us:.2f}"] for name, cost in costs.items()]
    return format_table(["µs over a bare call, under no_grad", "function"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="The host cost of one checkpointed region.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each region (%(default)s)")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = {
        name: summary(measure_training(region, x, options.seconds))
        for name, (region, x) in regions().items()
    }
    print(format_training(results))
    print()
    no_grad = summary(measure_no_grad(*regions()["function"], options.seconds / 4))
    print(format_no_grad(no_grad))
    if options.json:
        tables = results | {"no_grad": no_grad}
        save_json(
            options.json,
            "overhead",
            {
                table: {name: asdict(cost) for name, cost in costs.items()}
                for table, costs in tables.items()
            },
        )


if __name__ == "__main__":
    main()
