"""Fair timing, and the format of results: shared by all benchmarks.

Variants are timed in turn over many short rounds, each in a new random order: so a busy machine or
a warming chip affects all of them alike, and none always follows one of its own kind, with warm
caches. A figure is the median over rounds; a difference or a ratio is taken within one run, never
between runs.
"""

import gc
import json
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

Timings = dict[str, list[float]]
"""Seconds per call of each candidate, one figure per round: the n-th figures belong together."""


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    calls: int = 1,
    warmup: int = 2,
    min_rounds: int = 5,
    synchronize: Callable[[], object] = lambda: None,
) -> Timings:
    """Time every candidate, `calls` calls in a row, round after round for about `seconds`."""
    for _ in range(warmup):
        for call in candidates.values():
            call()
    names, order = list(candidates), random.Random(0)
    timings: Timings = {name: [] for name in names}
    with collected_by_hand():
        end = time.perf_counter() + seconds
        for turn in count():
            if turn >= min_rounds and time.perf_counter() > end:
                return timings
            order.shuffle(names)
            for name in names:
                call = candidates[name]
                synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                synchronize()
                timings[name].append((time.perf_counter() - start) / calls)
            gc.collect()
    raise AssertionError("unreachable: the rounds end by returning")


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Keep the garbage collector out of what is timed; `gc.collect()` is then cheap between."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def environment(device: str = "cpu") -> dict[str, str]:
    """What a reader must know to compare two results, and nothing about whose machine it was."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right, as wide as they need."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def save_json(path: Path, benchmark: str, results: object, device: str = "cpu") -> None:
    document = {"benchmark": benchmark, **environment(device), "results": results}
    path.write_text(json.dumps(document, indent=2) + "\n")
