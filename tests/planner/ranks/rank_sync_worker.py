"""Runs the cases of `test_rank_sync.py`: ranks that plan together, and differ in some way.

One process imports torch and forks the ranks of a world of two and of one of four: `python -m`
this, with a folder for the results.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from tests.planner.ranks.agreement_cases import (
    batches_differ,
    budgets_differ,
    lone_block,
    moved,
    pipeline,
    share_and_bytes,
    solved_together,
    solver_differs,
    split,
)
from tests.planner.ranks.error_cases import (
    ERRORS,
    error,
    in_a_collective,
    missing,
    other_call,
    stages_together,
)
from tests.planner.ranks.rank_helpers import DIM, TOKENS, Found, sharded
from tests.planner.ranks.unequal_cases import (
    experts,
    finding_unused,
    hooks_that_shard,
    sharded_outputs,
    skipped,
)
from tests.ranks import run_worlds


def cases_of_two(folder: Path) -> dict[str, Callable[[], Found]]:
    return {
        "budgets: ddp": partial(budgets_differ, DistributedDataParallel),
        "budgets: fsdp": partial(budgets_differ, sharded),
        "budgets: tp": partial(budgets_differ, split, torch.ones(TOKENS, DIM)),
        "budgets: share and bytes": share_and_bytes,
        "solver": solver_differs,
        "solved together": solved_together,
        "batches": batches_differ,
        **{f"error: {what}": partial(error, what) for what in ERRORS},
        "missing": missing,
        "error: in a collective": in_a_collective,
        "other call": other_call,
        "skipped": skipped,
        "experts: ddp": partial(experts, finding_unused, False),
        "experts: fsdp": partial(experts, sharded, True),
        "sharded outputs": sharded_outputs,
        "hooks that shard": hooks_that_shard,
        "pipeline: gpipe": partial(pipeline, ScheduleGPipe),
        "pipeline: 1f1b": partial(pipeline, Schedule1F1B),
        "stages together": stages_together,
        "moved": partial(moved, folder),
        "lone block": lone_block,
    }


def cases_of_four(_folder: Path) -> dict[str, Callable[[], Found]]:
    return {
        "pipeline: 1f1b, fsdp": partial(pipeline, Schedule1F1B),
        "budgets: ddp": partial(budgets_differ, DistributedDataParallel),
    }


WORLDS = {2: cases_of_two, 4: cases_of_four}


if __name__ == "__main__":
    sys.exit(run_worlds(WORLDS))
