"""Time that planning takes: `scripts/bench planning [--shape all | --zoo]`.

Measured are the seconds to profile a decoder of 8, 32 and 128 layers, and to solve for a budget of
half of its activations; a second budget costs only the latter. The time of a step stands beside
them, because profiling runs a few steps with every layer recomputed: that part grows with the
layers. The rest, measuring each distinct layer alone, does not.

With `--zoo`, tiny models of the zoo are planned on a CPU as beside a GPU, and each stage's ops and
CPU time are shown as multiples of a plain step's: `planning_stages.py` says what that can show.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch

import rekindle
from benchmarks.decoder import SHAPES, Shape
from benchmarks.measure import environment, format_table, save_json
from benchmarks.planning_stages import MODELS, format_stages
from benchmarks.planning_stages import measure as measure_stages
from benchmarks.workload import Workload, plain

LAYERS = (8, 32, 128)
SOLVES = 3


@dataclass(frozen=True)
class Planning:
    """One shape with so many layers."""

    shape: str
    layers: int
    step_seconds: float
    """With every layer recomputed."""
    profile_seconds: float
    solve_seconds: float
    distinct: int
    """Layers that were measured alone."""


def measure(shape: Shape, device: str, layers: int) -> Planning:
    work = Workload(replace(shape, layers=layers), device)

    def seconds(call: Callable[[], object]) -> float:
        work.synchronize()
        start = time.perf_counter()
        call()
        work.synchronize()
        return time.perf_counter() - start

    rekindle.apply(work.decoder, "recompute")
    taken = [seconds(lambda: work.step(plain)) for _ in range(SOLVES)]
    rekindle.remove(work.decoder)
    found = []
    profiled = seconds(
        lambda: found.append(rekindle.profile(work.decoder, lambda: work.decoder(work.x).sum()))
    )
    (profile,) = found
    solved = [seconds(lambda: rekindle.solve(profile, "50%")) for _ in range(SOLVES)]
    return Planning(
        shape.name,
        layers,
        round(median(taken), 4),
        round(profiled, 3),
        round(median(solved), 4),
        len(profile.blocks),
    )


def format_results(results: list[Planning]) -> str:
    rows = [
        [
            r.shape,
            str(r.layers),
            f"{r.step_seconds:.3f}",
            f"{r.profile_seconds:.2f}",
            f"{r.solve_seconds:.3f}",
        ]
        for r in results
    ]
    return format_table(["shape", "layers", "a step, s", "profile, s", "solve, s"], rows)


def plan_zoo(models: Sequence[str], budgets: Sequence[str], path: Path | None) -> None:
    """Show what the stages of planning run, model by model."""
    torch.set_num_threads(1)
    stages = [measure_stages(name, budget) for name in models for budget in budgets]
    print(format_stages(stages))
    if path:
        save_json(path, "planning stages", [asdict(each) for each in stages])


def main() -> None:
    parser = argparse.ArgumentParser(description="How long planning takes.")
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="tiny", help="(%(default)s)")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="(%(default)s)")
    parser.add_argument("--zoo", nargs="*", metavar="MODEL", help="plan these models of the zoo")
    parser.add_argument("--budget", nargs="+", default=["60%"], help="of --zoo (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    options = parser.parse_args()
    if options.zoo is not None:
        plan_zoo(options.zoo or MODELS, options.budget, options.json)
        return

    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = ["8b", "1b", "tiny"] if options.shape == "all" else [options.shape]
    if device == "cpu" and names != ["tiny"]:
        parser.error("without a GPU only --shape tiny can be measured")
    if device == "cpu":
        torch.set_num_threads(1)
    print(", ".join(f"{key} {value}" for key, value in environment(device).items()))
    measure(SHAPES["tiny"], device, LAYERS[0])  # loads what is loaded once
    results = [measure(SHAPES[name], device, count) for name in names for count in options.layers]
    print(format_results(results))
    if options.json:
        save_json(options.json, "planning", [asdict(result) for result in results], device)


if __name__ == "__main__":
    main()
