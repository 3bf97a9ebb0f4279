"""Plans on models nobody tuned for, beside their own checkpointing: `scripts/bench zoo`.

Each family of `zoo_models.py` runs in a process of its own: on a GPU in its full size, on a CPU in
a tiny one, which only shows that all of it runs. One that fails, or takes longer than `--limit`
seconds, is a row of the table, not the end. Measured are plain eager, the model's own gradient
checkpointing ("gc"), every block recomputed by rekindle, and `rekindle.fit` for shares of the plain
activation peak and for gc's peak: time and activation peak, relative to plain.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import rekindle
from benchmarks.figures import zoo as zoo_table
from benchmarks.measure import environment, format_table, save_json
from benchmarks.zoo_measure import AS_GC, Row, measure
from benchmarks.zoo_models import FAMILIES

SHARES = "0.6,0.35,gc"


class Child:
    """A process that measures one model once it is told to: before, it only imports."""

    def __init__(self, name: str, shares: str, seconds: float, folder: Path) -> None:
        self.name = name
        self._rows, self._errors = folder / f"{name}.json", folder / f"{name}.err"
        self._ready = ready_file(self._rows)
        command = [sys.executable, "-m", "benchmarks.zoo", "--one", name, "--shares", shares]
        command += ["--seconds", str(seconds), "--json", str(self._rows)]
        with self._errors.open("w") as stderr:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stderr)

    def wait_until_ready(self) -> None:
        """Wait until it has imported what it needs, or has ended."""
        while self._process.poll() is None and not self._ready.exists():
            time.sleep(_POLL)

    def measure(self, limit: float) -> list[dict[str, Any]]:
        """Tell it to measure; returns its rows, and one more that says what went wrong, if so."""
        problem = ""
        try:
            self._process.communicate(b"\n", timeout=limit)
            if self._process.returncode:
                problem = f"ended with {self._process.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"not done in {limit:.0f} s"
        self.end()
        rows: list[dict[str, Any]] = []
        if self._rows.exists():
            rows = json.loads(self._rows.read_text())["results"]
        lines = self._errors.read_text().strip().splitlines()
        if problem or any(row["error"] and not is_refusal(row) for row in rows):
            print("\n".join(lines[-_LINES_OF_ERRORS:]), flush=True)
        if problem:
            said = ": ".join([problem, *lines[-1:]])
            rows.append(asdict(Row(self.name, FAMILIES[self.name].title, "process", error=said)))
        return rows

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def ready_file(rows: Path) -> Path:
    """The file that a process makes when it is ready, beside that for its rows."""
    return rows.with_suffix(".ready")


def is_refusal(row: dict[str, Any]) -> bool:
    """Return whether no plan was found, rather than anything went wrong."""
    return str(row["error"]).startswith(rekindle.BudgetError.__name__)


_LINES_OF_ERRORS = 30
_AT_ONCE = 8
"""Processes that import at the same time."""
_POLL = 0.1
"""Seconds between two looks for a process that is ready."""


def batched(names: Sequence[str], count: int) -> Iterator[Sequence[str]]:
    """Yield so many names at a time."""
    for first in range(0, len(names), count):
        yield names[first : first + count]


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """All figures of a model's rows."""

    def shown(value: Any, form: str = ".2f") -> str:
        return "-" if value is None else format(value, form)

    heads = ["strategy", "ms", "time", "predicted", "line", "peak", "predicted", "budget"]
    heads += ["planning s", "steps", "gradients"]
    ratios = ("time_ratio", "predicted_time_ratio", "line_ratio", "peak_ratio")
    lines = [
        [
            row["strategy"],
            shown(row["milliseconds"], ".1f"),
            *(shown(row[key]) for key in (*ratios, "predicted_peak_ratio", "budget_ratio")),
            shown(row["planning_seconds"], ".1f"),
            shown(row["planning_steps"], ".0f"),
            row["gradients"] or "-",
        ]
        for row in rows
    ]
    notes = [f"{row['strategy']}: {text}" for row in rows if (text := _note(row))]
    return "\n".join([format_table(heads, lines), *notes])


def _note(row: dict[str, Any]) -> str:
    return row["error"] or "; ".join(f"{n} x {what}" for what, n in row["plan"].items())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", action="append", choices=FAMILIES, help="repeat for more (all)")
    parser.add_argument(
        "--shares",
        default=SHARES,
        help='budgets: shares of the plain activation peak, and "gc" (%(default)s)',
    )
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of timing a model (%(default)s)"
    )
    parser.add_argument(
        "--limit", type=float, default=150.0, help="seconds of a model (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    parser.add_argument("--one", choices=FAMILIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for share in options.shares.split(","):
        if share != AS_GC and not 0 < float(share) <= 1:
            parser.error(f"a share is above 0 and at most 1, or {AS_GC}, but got {share}")
    return options


def main() -> int:
    options = arguments()
    if options.one:
        return measure_one(options.one, options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(", ".join(f"{key} {value}" for key, value in environment(device).items()))
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ended:

        def start(name: str) -> Child:
            child = Child(name, options.shares, options.seconds, Path(folder))
            ended.callback(child.end)
            return child

        names = options.model or list(FAMILIES)
        for group in batched(names, _AT_ONCE):
            children = [start(name) for name in group]
            for child in children:  # none imports while another one measures
                child.wait_until_ready()
            for child in children:
                begun = time.perf_counter()
                found = child.measure(options.limit)
                taken = time.perf_counter() - begun
                print(f"\n{FAMILIES[child.name].title} ({child.name}), {taken:.0f} s")
                print(format_rows(found), flush=True)
                results += found
                if options.json:  # after each, so that a run that is ended leaves what it has
                    save_json(options.json, "zoo", results, device)
    print(f"\n{zoo_table({'results': results})}")
    return 0


def measure_one(name: str, options: argparse.Namespace) -> int:
    """Measure a model in this process, once there is a line to read."""
    # cuBLAS reads this when it starts, and has no deterministic mode without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    family = FAMILIES[name]
    family.case("meta", is_large=False)  # so that its modules are imported
    ready_file(options.json).touch()
    sys.stdin.readline()

    def save(rows: list[Row]) -> None:
        save_json(options.json, "zoo", [asdict(row) for row in rows], device)

    measure(name, family, options.shares.split(","), options.seconds, device, save)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
