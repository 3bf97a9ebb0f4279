"""Runs the cases of `test_fit_on_ranks.py`: a model is fitted under DDP and under FSDP2.

Under FSDP2 also with its layers compiled.
"""

import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rekindle
from benchmarks.decoder import SHAPES, Decoder
from rekindle.strategy import Keep, Recompute
from tests.ranks import Cases, local, run_worlds
from tests.toys import Stack
from tests.wrong import wrong_recompute


def sharded(model: Decoder) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


KINDS = {"ddp": DistributedDataParallel, "fsdp": sharded}
WHOLE = (Keep(), Recompute())


def whole_blocks_only(profile: rekindle.Profile) -> rekindle.Profile:
    """The profile with blocks that are kept or recomputed: a plan has to recompute some of them."""
    blocks = (
        replace(block, candidates=tuple(c for c in block.candidates if c.strategy in WHOLE))
        for block in profile.blocks
    )
    return replace(profile, blocks=tuple(blocks))


def refused(model: nn.Module, x: Tensor) -> bool:
    """Returns whether a plan is refused here, where regions are wrong on the second rank alone."""
    rekindle.remove(model)
    profile = whole_blocks_only(rekindle.profile(model, x, loss=Tensor.sum))
    try:
        with wrong_recompute(0.03 * dist.get_rank()):
            rekindle.fit(model, x, "80%", loss=Tensor.sum, profile=profile)
    except rekindle.RekindleError as error:
        return "bug in rekindle" in str(error) and rekindle.plan_of(model) is None
    return False


def found(kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = replace(SHAPES["tiny"], dim=64, ffn=128, layers=4, tokens=64)
    model = KINDS[kind](Decoder(shape, dtype=torch.float32))
    torch.manual_seed(dist.get_rank())
    x = torch.randn(1, 64, 64)
    larger = torch.randn(1 + dist.get_rank(), 64, 64)  # on one rank only

    def gradients(x: Tensor = x) -> list[Tensor]:
        model.zero_grad()
        model(x).sum().backward()
        return [local(p.grad).clone() for p in model.parameters()]

    expected, expected_of_larger = gradients(), gradients(larger)
    plan = rekindle.fit(model, x, "80%", loss=Tensor.sum)
    same = all(map(torch.equal, gradients(), expected))
    assert plan.measured_peak is not None
    same_of_larger = all(map(torch.equal, gradients(larger), expected_of_larger))
    return {
        "larger": same_of_larger and rekindle.plan_of(model) is plan,
        "same": same,
        "verified": plan.verified,
        "refused": refused(model, x),
        "fits": plan.measured_peak <= plan.budget,
        "options": [[path, asdict(option)] for path, _, option in plan.blocks],
    }


def found_compiled() -> dict[str, Any]:
    """A model whose layers are compiled, and then sharded."""
    torch.manual_seed(0)
    model = Stack(3, dim=32)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(128, 32)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [local(p.grad).clone() for p in model.parameters()]

    expected = gradients()
    plan = rekindle.fit(model, x, "80%", loss=lambda out: out.square().mean())
    compiled = counters["stats"]["unique_graphs"]
    assert plan.measured_peak is not None
    return {
        "same": all(map(torch.equal, gradients(), expected)),
        "compiled": plan.compiled,
        "compiled_later": counters["stats"]["unique_graphs"] - compiled,
        "verified": plan.verified,
        "fits": plan.measured_peak <= plan.budget,
        "options": [[path, asdict(option)] for path, _, option in plan.blocks],
    }


def cases(_folder: Path) -> Cases:
    kinds: dict[str, Any] = {kind: partial(found, kind) for kind in KINDS}
    return {**kinds, "compiled": found_compiled}


if __name__ == "__main__":
    sys.exit(run_worlds({2: cases}))
