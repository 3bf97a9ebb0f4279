"""Milliseconds that `import rekindle` takes on top of torch's: `scripts/bench imports`.

Each import has a process of its own, after torch's is done, and the files compiled once before. CPU
time is counted: wall time is that and the wait for a busy machine. Python's garbage collector may
look at all that torch has made while rekindle is imported, which is counted too.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.measure import environment, format_table, save_json

STATEMENTS = ("import rekindle", "import rekindle; rekindle.fit")
"""The planner is imported when one of its names is first used."""

_PROGRAM = """
import sys, time
import torch, torch.utils.checkpoint
before, start = len(sys.modules), time.process_time()
{statement}
print(time.process_time() - start, len(sys.modules) - before)
"""


@dataclass(frozen=True)
class Import:
    """One statement."""

    statement: str
    milliseconds: float
    """CPU time on top of torch's: the median."""
    modules: int
    rounds: int


def measure(statement: str, rounds: int, compiled_files: str) -> Import:
    environ = {**os.environ, "PYTHONPYCACHEPREFIX": compiled_files}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    program = _PROGRAM.format(statement=statement)
    seconds, modules = [], 0
    for number in range(rounds + 1):
        command = [sys.executable, "-c", program]
        found = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        took, count = found.stdout.split()
        modules = int(count)
        if number:  # the first one compiles the files
            seconds.append(float(took))
    return Import(statement, round(median(seconds) * 1e3, 1), modules, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description="What `import rekindle` takes on top of torch's.")
    parser.add_argument("--rounds", type=int, default=11, help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    options = parser.parse_args()

    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    with tempfile.TemporaryDirectory() as folder:
        results = [measure(statement, options.rounds, folder) for statement in STATEMENTS]
    rows = [[r.statement, f"{r.milliseconds:.0f}", str(r.modules)] for r in results]
    print(f"\n{format_table(['on top of torch', 'ms', 'modules'], rows)}")
    if options.json:
        save_json(options.json, "imports", [asdict(result) for result in results])


if __name__ == "__main__":
    main()
