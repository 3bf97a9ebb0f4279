"""Runs the cases of `test_parallel.py`, with every strategy for activations.

One process imports torch and forks the ranks of a world of two and of one of four: `python -m`
this, with a folder for the results.
"""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.distributed.parallel_cases import CASES, Case
from tests.distributed.parallel_model import Outcome
from tests.ranks import Cases, run_worlds


def outcome_of(case: Case, way: str) -> dict[str, Any]:
    """The fields of the outcome of a case."""
    outcome = Outcome()
    torch.manual_seed(0)
    case.run(way, outcome)
    return vars(outcome)


def cases_of(world: int, _folder: Path) -> Cases:
    """Every case of a world, without rekindle and in each way to hold activations."""
    warnings.simplefilter("ignore")
    return {
        (case.name, way): partial(outcome_of, case, way)
        for case in CASES
        if case.world == world
        for way in ("plain", *case.ways)
    }


WORLDS = {world: partial(cases_of, world) for world in (2, 4)}


if __name__ == "__main__":
    run_worlds(WORLDS, at_once=True)
