"""The command line that benchmarks of a whole decoder share: shapes, seconds, output path."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.decoder import SHAPES, Shape
from benchmarks.measure import environment, save_json


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


Measure = Callable[[Shape, str, float], tuple[str, Sequence[Any]]]
"""Measures a shape on a device for some seconds: what to print, and the results."""


def main(
    name: str,
    about: str,
    measure: Measure,
    every: list[str],
    seconds: float,
    more: Mapping[str, tuple[Shape, Shape]] | None = None,
) -> None:
    """Run one benchmark: `every` shape that `--shape all` stands for, in `seconds` each.

    `more` has shapes of the benchmark's own: each on a GPU, and on a CPU.
    """
    shapes = SHAPES | {key: large for key, (large, _) in (more or {}).items()}
    small = {"tiny": SHAPES["tiny"]} | {key: tiny for key, (_, tiny) in (more or {}).items()}
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--shape", choices=[*shapes, "all"], default="tiny", help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="of each shape (%(default)s)"
    )
    options = parser.parse_args()

    # cuBLAS reads this when it starts, and has no deterministic mode without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = every if options.shape == "all" else [options.shape]
    if device == "cpu" and not set(names) <= set(small):
        parser.error(f"without a GPU only --shape {' or '.join(small)} can be measured")
    if device == "cpu":
        shapes = small
        torch.set_num_threads(1)
    print(", ".join(f"{key} {value}" for key, value in environment(device).items()))
    results: list[Any] = []
    for shape in names:
        text, found = measure(shapes[shape], device, options.seconds)
        print(f"\n{shapes[shape]}, {found[0].rounds} rounds\n{text}", flush=True)
        results += found
        if options.json:  # after each, so that a run that is ended leaves what it has
            save_json(options.json, name, [asdict(result) for result in results], device)
