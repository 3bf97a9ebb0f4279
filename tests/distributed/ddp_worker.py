"""Runs the cases of `test_ddp.py`: DDP around a model, with regions and without."""

import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rekindle
from tests.ranks import Cases, local_gradients, run_worlds
from tests.toys import Block

WORLD = 2
STEPS = 3
DEPTH = 3
REGIONS = DEPTH + 1  # the first block is used twice


@dataclass(frozen=True)
class Case:
    find_unused: bool
    static: bool
    accumulate: bool
    """Two micro-batches a step, the first of them under `no_sync`."""

    def micro_batches(self, step: int) -> int:
        """DDP cannot have its first backward under `no_sync` with a static graph, regions or not:
        `expect_autograd_hooks_ INTERNAL ASSERT FAILED` (torch 2.13)."""
        return 2 if self.accumulate and not (self.static and step == 0) else 1

    def __str__(self) -> str:
        names = {
            "find_unused": self.find_unused,
            "static": self.static,
            "accumulate": self.accumulate,
        }
        return "+".join(name for name, on in names.items() if on) or "default"


CASES = [Case(*flags) for flags in product([False, True], repeat=3)]


class Model(nn.Module):
    """Blocks with dropout, one of them used twice, batch norm, and a part that is not used."""

    def __init__(self, checkpointed: bool, unused: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(Block(8, drop=0.2), nn.BatchNorm1d(8)) for _ in range(DEPTH)
        )
        self.head = nn.Linear(8, 4)
        self.unused = nn.Linear(8, 8) if unused else None
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = rekindle.checkpoint(block, x) if self.checkpointed else block(x)
        return self.head(x)  # type: ignore[no-any-return]


def train(case: Case, checkpointed: bool) -> dict[str, Any]:
    """Some steps; the gradients of each, and the model and the counts after all."""
    torch.manual_seed(0)
    model = Model(checkpointed, unused=case.find_unused or case.static)
    parallel = DistributedDataParallel(
        model,
        find_unused_parameters=case.find_unused,
        static_graph=case.static,
        bucket_cap_mb=0.001,  # several buckets
    )
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    torch.manual_seed(100 + dist.get_rank())
    grads: list[dict[str, Tensor | None]] = []
    with rekindle.observe() as seen:
        for step in range(STEPS):
            optimizer.zero_grad()
            for left in reversed(range(case.micro_batches(step))):
                with parallel.no_sync() if left else nullcontext():
                    parallel(torch.randn(4, 8)).square().sum().backward()
            grads.append(local_gradients(model))
            optimizer.step()
    counts = seen.total.forwards, seen.total.replays
    return {"grads": grads, "state": model.state_dict(), "counts": counts}


def cases(_folder: Path) -> Cases:
    """Every case with and without regions."""
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    return {
        (str(case), checkpointed): partial(train, case, checkpointed)
        for case in CASES
        for checkpointed in (False, True)
    }


if __name__ == "__main__":
    sys.exit(run_worlds({WORLD: cases}))
