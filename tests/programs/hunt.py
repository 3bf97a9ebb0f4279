"""Runs many random programs in each mode, and prints those that do not end as the plain run does.

    python -m tests.programs.hunt --count 20000 --workers 16
    python -m tests.programs.hunt --seconds 600 --mode spilled --mode "whole, spilled"

A mode is a way to run every region of a program (`modes.MODES`); "mixed" draws one for each region,
and the modes that begin with "whole" offload the whole program, regions and all. The program of a
seed is the same in every mode but for "mixed" ones and "reentrant", so the plain run is shared. In
modes that move activations a program is run three times in a row, since the engine learns; with odd
seeds what is spilled is written at once, with even ones in the background.

Each program that ended otherwise, or raised where the plain run does not, is printed with a line
that runs it alone. The exit status is 1 if there was any, 0 else.
"""

import argparse
import faulthandler
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

import rekindle
from rekindle.offload.owners import forget_unowned
from rekindle.offload.tiers.spill_file import SpillFile
from tests.programs.drawing import program_of
from tests.programs.modes import MODES, Mode
from tests.programs.running import differences, run
from tests.programs.steps import Block, Program, Region, Step
from tests.programs.text import format_program

_BATCH = 20
"""Seeds that a process is given at a time."""
_PATIENCE = 600
"""Seconds after which a program is taken for one that hangs."""
_EVERY = 60
"""Seconds from one line that tells how far it is to the next."""
_TIMES = 3
"""How often a program runs in a mode that learns."""


@dataclass(frozen=True)
class Way:
    """How the programs of one line of the table are drawn and run."""

    modes: dict[str, Mode]
    """What regions are drawn from."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What the whole program runs in."""
    plain: bool = False
    """Whether regions run as in the plain run: what is tried is what is around."""
    moves: bool = False
    """Whether it sends activations elsewhere, and learns from step to step."""


def _whole(**options: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: rekindle.offload(**{"min_bytes": 0} | options)


def _ways() -> dict[str, Way]:
    found = {name: Way({name: mode}, moves=mode.moves) for name, mode in MODES.items()}
    found["mixed"] = Way(MODES, moves=True)
    default = {"default": MODES["default"]}
    lines = {"spilled": "disk"} | ({"offloaded": "host"} if torch.cuda.is_available() else {})
    for word, tier in lines.items():
        all_of_it, free = _whole(tier=tier, quota=1.0, derive=False), _whole(tier=tier)
        part = _whole(tier=tier, quota=0.5)
        found[f"whole, {word}"] = Way(default, all_of_it, plain=True, moves=True)
        found[f"whole, {word} or derived"] = Way(default, part, plain=True, moves=True)
        found[f"whole, {word} as is free"] = Way(default, free, plain=True, moves=True)
        found[f"whole, mixed, {word}"] = Way(MODES, part, moves=True)
    return found


WAYS = _ways()


@dataclass(frozen=True)
class Failure:
    """A program that did not end as the plain run."""

    way: str
    seed: int
    kind: str
    """Either of "wrong" and "errors"."""
    text: str


@dataclass(frozen=True)
class Batch:
    """What came of some seeds."""

    counts: "Counter[tuple[str, str]]"
    failures: tuple[Failure, ...]


@contextmanager
def _written(at_once: bool) -> Iterator[None]:
    """What is spilled is away by the next line, or some time later."""
    write = SpillFile.write

    def write_now(self: SpillFile, *args: Any) -> Any:
        writing = write(self, *args)
        writing.wait()
        return writing

    if at_once:
        SpillFile.write = write_now  # type: ignore[method-assign]
    try:
        yield
    finally:
        SpillFile.write = write  # type: ignore[method-assign]


_REFUSED = (RuntimeError, NotImplementedError)


def _plain(program: Program, device: str, modes: dict[str, Mode]) -> dict[str, Any] | None:
    """What the plain run leaves behind; None if autograd refuses the program."""
    try:
        return run(program, plain=True, device=device, modes=modes)
    except _REFUSED:
        return None


def _failure(
    way: Way, program: Program, expected: dict[str, Any], seed: int, device: str
) -> tuple[str, str] | None:
    """How a program failed, and a text that shows it; None if it ended as the plain run."""
    forget_unowned()
    try:
        with _written(at_once=bool(seed % 2)):
            for time_run in range(1, 1 + (_TIMES if way.moves else 1)):
                with way.around():
                    found = run(program, plain=way.plain, device=device, modes=way.modes)
                differ = differences(expected, found)
                if differ:
                    return "wrong", f"run {time_run}: {len(differ)} differ, first {differ[0]}"
    except Exception:  # noqa: BLE001 - whatever it is, the plain run did not raise it
        return "errors", traceback.format_exc(limit=-8)
    return None


def _bare(program: Program) -> Program:
    """A program without the names of its modes: what its plain run depends on."""
    return replace(program, body=tuple(map(_bare_step, program.body)))


def _bare_step(step: Step) -> Step:
    match step:
        case Region():
            return replace(step, mode="", body=tuple(map(_bare_step, step.body)))
        case Block():
            return replace(step, body=tuple(map(_bare_step, step.body)))
    return step


def look_at(seeds: range, names: list[str], device: str) -> Batch:
    """Run the programs of some seeds in some ways."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(device != "cpu")
    warnings.simplefilter("ignore")
    counts: Counter[tuple[str, str]] = Counter()
    failures = []
    for seed in seeds:
        shared: dict[Program, dict[str, Any] | None] = {}
        for name in names:
            faulthandler.dump_traceback_later(_PATIENCE, exit=True)
            way = WAYS[name]
            program = program_of(seed, way.modes)
            bare = _bare(program) if not any(m.reentrant for m in way.modes.values()) else program
            if bare not in shared:
                shared[bare] = _plain(program, device, way.modes)
            expected = shared[bare]
            counts[name, "programs"] += 1
            if expected is None:
                counts[name, "skipped"] += 1
                continue
            failed = _failure(way, program, expected, seed, device)
            if failed is not None:
                counts[name, failed[0]] += 1
                text = f"{format_program(program)}\n{failed[1]}"
                failures.append(Failure(name, seed, failed[0], text))
    faulthandler.cancel_dump_traceback_later()
    return Batch(counts, tuple(failures))


def hunt(
    names: list[str], first: int, count: int, seconds: float, workers: int, device: str
) -> bool:
    """Run programs until there were enough, or there is no more time; whether all ended well."""
    begin = told = time.monotonic()
    counts: Counter[tuple[str, str]] = Counter()
    waiting = iter(range(first, first + count, _BATCH))
    running: set[Future[Batch]] = set()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        while True:
            while len(running) < 2 * workers and time.monotonic() - begin < seconds:
                start = next(waiting, None)
                if start is None:
                    break
                seeds = range(start, min(start + _BATCH, first + count))
                running.add(pool.submit(look_at, seeds, names, device))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                batch = future.result()
                counts += batch.counts
                for failure in batch.failures:
                    print(format_failure(failure, device), flush=True)  # noqa: T201
            if time.monotonic() - told > _EVERY:
                told = time.monotonic()
                so_far = max(counts[name, "programs"] for name in names)
                print(f"{so_far} programs of each mode so far", file=sys.stderr)  # noqa: T201
    print(format_counts(names, counts, time.monotonic() - begin))  # noqa: T201
    return not any(counts[name, kind] for name in names for kind in ("wrong", "errors"))


def format_failure(failure: Failure, device: str) -> str:
    """A failure, with the line that runs its program alone."""
    again = (
        f"python -m tests.programs.hunt --mode {failure.way!r} --first {failure.seed} --count 1"
        f"{'' if device == 'cpu' else f' --device {device}'} --workers 1"
    )
    return f"--- {failure.way}, seed {failure.seed}: {failure.kind}\n{again}\n{failure.text}\n"


def format_counts(names: list[str], counts: "Counter[tuple[str, str]]", seconds: float) -> str:
    """A table of what came of each mode."""
    kinds = ("programs", "wrong", "errors", "skipped")
    width = max(map(len, names))
    lines = [f"{'mode':<{width}}" + "".join(f"{kind:>10}" for kind in kinds)]
    lines += [
        f"{name:<{width}}" + "".join(f"{counts[name, kind]:>10}" for kind in kinds)
        for name in names
    ]
    return "\n".join([*lines, f"{seconds:.0f} s, torch {torch.__version__}"])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.hunt", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--count", type=int, default=10**9, help="programs for each mode")
    parser.add_argument("--seconds", type=float, default=None, help="when to begin no more")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first program")
    parser.add_argument("--mode", action="append", choices=WAYS, help="one mode; may be repeated")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    given = parser.parse_args()
    if given.count == 10**9 and given.seconds is None:
        parser.error("say how many programs (--count), or how long (--seconds)")
    seconds = float("inf") if given.seconds is None else given.seconds
    names = given.mode or list(WAYS)
    if given.device == "cuda":  # for the processes that are started, too
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    ended_well = hunt(names, given.first, given.count, seconds, given.workers, given.device)
    return 0 if ended_well else 1


if __name__ == "__main__":
    sys.exit(main())
