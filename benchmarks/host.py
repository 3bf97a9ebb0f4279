"""Host time of a step with every block recomputed, on tiny models of the zoo: `scripts/bench host`.

The tensors are tiny, so a step is almost all Python and dispatch, as on a GPU where the host is the
limit. Shown are the CPU times of a step as it is, under the library's own gradient checkpointing,
and with every block recomputed by rekindle, in turns. CPU time, because another process on the
machine does not count in it.
"""

import argparse
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

import rekindle
from benchmarks.measure import Timings, format_table, interleaved, save_json
from benchmarks.zoo_measure import GC, PLAIN, RECOMPUTE, Strategy, own_checkpointing
from benchmarks.zoo_models import FAMILIES, Case

_CALLS = 5
"""Steps in a row that are timed."""
_WARM_UP = 2
"""Steps before those."""


@dataclass(frozen=True)
class HostTime:
    """CPU milliseconds of a step; of the model's own checkpointing None if it has none."""

    model: str
    plain_ms: float
    gc_ms: float | None
    recompute_ms: float
    to_gc: float | None
    """The median over rounds of the last over gc."""


def measure(name: str, seconds: float) -> HostTime:
    """Time the steps of one model of the zoo, in turns."""
    case = FAMILIES[name].case("cpu", is_large=False)
    model = case.model
    strategies = [
        Strategy(PLAIN, lambda: None, lambda: None),
        own_checkpointing(model),
        Strategy(
            RECOMPUTE,
            lambda: rekindle.apply(model, "recompute"),
            lambda: rekindle.remove(model),
        ),
    ]
    taken: Timings = {each.name: [] for each in strategies if each is not None}

    def time_steps(strategy: Strategy) -> None:
        with strategy.applied():
            for _ in range(_WARM_UP):
                _step(case)
            start = time.process_time()
            for _ in range(_CALLS):
                _step(case)
            taken[strategy.name].append((time.process_time() - start) / _CALLS)

    rounds = {each.name: lambda s=each: time_steps(s) for each in strategies if each is not None}
    interleaved(rounds, seconds=seconds)  # for its order and its garbage collector
    found = {each: round(median(values) * 1e3, 3) for each, values in taken.items()}
    pairs = zip(taken[RECOMPUTE], taken.get(GC, ()), strict=False)
    ratios = [ours / theirs for ours, theirs in pairs]
    return HostTime(
        name,
        found[PLAIN],
        found.get(GC),
        found[RECOMPUTE],
        round(median(ratios), 3) if ratios else None,
    )


def _step(case: Case) -> None:
    case.model.zero_grad(set_to_none=True)
    case.loss().backward()


def format_results(results: Sequence[HostTime]) -> str:
    rows = [
        [
            each.model,
            f"{each.plain_ms:.2f}",
            "none" if each.gc_ms is None else f"{each.gc_ms:.2f}",
            f"{each.recompute_ms:.2f}",
            "" if each.to_gc is None else f"{each.to_gc:.2f}",
        ]
        for each in results
    ]
    return format_table(["CPU ms a step", PLAIN, GC, RECOMPUTE, "times gc"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="The host time of recomputing every block.")
    parser.add_argument("--model", choices=[*FAMILIES, "all"], default="all", help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each model (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    options = parser.parse_args()

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    names = list(FAMILIES) if options.model == "all" else [options.model]
    results = [measure(name, options.seconds) for name in names]
    print(format_results(results))
    if options.json:
        save_json(options.json, "host", [asdict(result) for result in results])


if __name__ == "__main__":
    main()
