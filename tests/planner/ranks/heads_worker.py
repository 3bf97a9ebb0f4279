"""Runs the cases of `test_heads_on_ranks.py`: heads under DDP, FSDP2 and tensor parallel."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rekindle
from tests.language_models import LanguageModel, some_words
from tests.ranks import Cases, local, run_worlds


def sharded(model: LanguageModel) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model.head)
    return fully_shard(model)


def tensor_parallel(model: LanguageModel) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, mesh, plan)


KINDS = {"ddp": DistributedDataParallel, "fsdp": sharded, "tensor parallel": tensor_parallel}


def found(kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = KINDS[kind](LanguageModel())
    torch.manual_seed(0 if kind == "tensor parallel" else dist.get_rank())
    words = some_words()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(words).backward()
        return [local(p.grad).clone() for p in model.parameters()]

    expected = gradients()
    # The logits of a head that is split are a `DTensor`, which is simply there.
    plan = rekindle.fit(model, words, "97%" if kind == "tensor parallel" else "60%")
    same = all(map(torch.equal, gradients(), expected))
    by_rows = [[path, str(strategy)] for path, _, strategy in plan.heads]
    rekindle.remove(model)
    assert plan.measured_peak is not None
    return {
        "same": same,
        "same after remove": all(map(torch.equal, gradients(), expected)),
        "heads": by_rows,
        "fits": plan.measured_peak <= plan.budget,
    }


def cases(_folder: Path) -> Cases:
    return {kind: partial(found, kind) for kind in KINDS}


if __name__ == "__main__":
    sys.exit(run_worlds({2: cases}))
