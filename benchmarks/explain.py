"""Seconds and host memory that an explanation takes without a GPU: `scripts/bench explain`.

Explained is a step of a Llama of transformers on the meta device, as on an H100, with the state of
AdamW. Each shape has a process of its own, so that its host memory is its own too: that of the
whole process, torch and transformers included.
"""

import argparse
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

import rekindle
from benchmarks.llama import LLAMA_8B, LLAMA_70B, TINY_LLAMA, Llama, LlamaShape
from benchmarks.measure import environment, format_table, save_json

SHAPES = {"8b": LLAMA_8B, "70b": LLAMA_70B, "tiny": TINY_LLAMA}
LIKE = "H100"


@dataclass(frozen=True)
class Explaining:
    """One shape."""

    shape: str
    seconds: float
    host_gib: float
    """The most memory that the process had."""
    peak_gib: float
    """The peak of the step that is explained."""
    json_kib: float


def measure(shape: LlamaShape) -> Explaining:
    model = Llama(shape, device="meta", dtype=torch.bfloat16)
    tokens = torch.zeros(shape.batch, shape.tokens, dtype=torch.long, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    start = time.perf_counter()
    found = rekindle.explain(model, tokens, optimizer=optimizer, device="meta", like=LIKE)
    text = str(found)
    seconds = time.perf_counter() - start
    unit = 2**30 if sys.platform == "darwin" else 2**20
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    print(f"\n{shape.name}: {text}", flush=True)
    size = len(str(found.as_json())) / 2**10
    return Explaining(shape.name, round(seconds, 2), round(host, 2), found.peak / 2**30, size)


def format_results(results: list[Explaining]) -> str:
    rows = [
        [r.shape, f"{r.seconds:.1f}", f"{r.host_gib:.2f}", f"{r.peak_gib:.1f}", f"{r.json_kib:.0f}"]
        for r in results
    ]
    heads = ["shape", "explain, s", "host memory, GiB", "peak of the step, GiB", "values, KiB"]
    return format_table(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="What an explanation takes without a GPU.")
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all", help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    options = parser.parse_args()

    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    names = ["8b", "70b"] if options.shape == "all" else [options.shape]
    results = []
    for name in names:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            results.append(process.submit(measure, SHAPES[name]).result())
    print(f"\n{format_results(results)}")
    if options.json:
        save_json(options.json, "explain", [asdict(result) for result in results])


if __name__ == "__main__":
    main()
