"""What each rank of `test_ddp.py` runs: every case, with regions and without."""

import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rekindle
from tests.ranks import fork_ranks, process_group
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


def train(case: Case, checkpointed: bool, rank: int) -> dict[str, Any]:
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
    torch.manual_seed(100 + rank)
    grads: list[dict[str, Tensor | None]] = []
    with rekindle.observe() as seen:
        for step in range(STEPS):
            optimizer.zero_grad()
            for left in reversed(range(case.micro_batches(step))):
                with parallel.no_sync() if left else nullcontext():
                    parallel(torch.randn(4, 8)).square().sum().backward()
            grads.append(
                {
                    name: None if p.grad is None else p.grad.clone()
                    for name, p in model.named_parameters()
                }
            )
            optimizer.step()
    counts = seen.total.forwards, seen.total.replays
    return {"grads": grads, "state": model.state_dict(), "counts": counts}


def work(rank: int, folder: Path) -> None:
    """Run every case with and without regions, and leave the results in a file."""
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    with process_group(rank, WORLD, folder / "rendezvous"):
        results = {
            (str(case), checkpointed): train(case, checkpointed, rank)
            for case in CASES
            for checkpointed in (False, True)
        }
        torch.save(results, folder / f"{rank}.pt")


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(work, rank, Path(sys.argv[1])) for rank in range(WORLD)))
