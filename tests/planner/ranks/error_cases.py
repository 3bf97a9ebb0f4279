"""Cases of `test_rank_sync.py`: errors on one rank, and ranks that make other calls or none."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rekindle
from rekindle.planner.measure.block_benchmark import BlockBenchmark
from rekindle.planner.ranks import rank_group
from rekindle.planner.types import BlockProfile, Candidate
from rekindle.strategy import Keep, Recompute, Strategy
from tests.planner.ranks.rank_helpers import (
    Found,
    fitted,
    loss_of,
    on_one_rank,
    own_batch,
    raised,
    stack,
)


def fails(out: Tensor) -> Tensor:
    raise ZeroDivisionError("a loss that fails")


class OwnError(Exception):
    """Cannot be made of a message."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fails_oddly(out: Tensor) -> Tensor:
    raise OwnError(1, 2)


def fail_on_one_rank(*_: Any) -> None:
    if dist.get_rank() == 1:
        raise IndexError("a block that fails")


def error(what: str) -> Found:
    """An error on one rank is raised on both; and the next call works."""
    model, x = DistributedDataParallel(stack(3)), own_batch()
    fit = partial(rekindle.fit, model, x, "70%", loss=loss_of)
    if what == "budget":
        call = partial(rekindle.fit, model, x, on_one_rank("many", "70%"), loss=loss_of)
    elif what == "too small":
        call = partial(rekindle.fit, model, x, on_one_rank(2000, "70%"), loss=loss_of)
    elif what == "loss":
        call = partial(rekindle.fit, model, x, "70%", loss=on_one_rank(fails, loss_of))
    elif what == "odd error":
        call = partial(rekindle.fit, model, x, "70%", loss=on_one_rank(fails_oddly, loss_of))
    elif what == "model":
        call = partial(rekindle.fit, on_one_rank(3, model), x, "70%", loss=loss_of)
    elif what == "options":
        call = partial(fit, verify=on_one_rank("peak", "auto"))
    elif what == "batch":
        call = partial(rekindle.fit, model, on_one_rank(torch.ones(3, 5), x), "70%", loss=loss_of)
    elif what == "profile":
        call = partial(rekindle.profile, model, x, loss=on_one_rank(fails, loss_of))
    elif what == "alone":  # the block fails when it is run alone, after whole steps
        call = _fails_alone(model, fit)
    else:
        assert what == "models"
        model = stack(2 + dist.get_rank())
        call = partial(rekindle.fit, model, x, "70%", loss=loss_of)
    found = raised(call)
    left = {
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "plan": rekindle.plan_of(model) is None,
    }
    return {"raised": found, "left": left, "then": _works()}


def _works() -> bool:
    """Ranks can plan together."""
    keep, drop = option_of(Keep(), 9), option_of(Recompute(), 1)
    block = BlockProfile("Block", "Block", (keep, drop))
    profile = rekindle.Profile("Stack", "none", "", 0, 0, 0, 0.0, 0.0, (block,), (("a", 0),))
    budget = on_one_rank(5, 100)
    return rekindle.solve(profile, budget, group=dist.group.WORLD).budget == 5


def option_of(strategy: Strategy, held: int) -> Candidate:
    return Candidate(strategy, bytes_held=held, forward_seconds=1.0, backward_seconds=1.0)


def _fails_alone(model: nn.Module, fit: Callable[[], Any]) -> Callable[[], Any]:
    def measured(*_: Any) -> Any:
        raise IndexError("a block that fails")

    def call() -> None:
        if dist.get_rank() == 1:
            with mock.patch.object(BlockBenchmark, "measure", measured):
                fit()
        else:
            fit()

    return call


ERRORS = (
    "budget",
    "too small",
    "loss",
    "odd error",
    "model",
    "options",
    "batch",
    "profile",
    "alone",
    "models",
)


def missing() -> Found:
    """One rank alone makes a collective call, and gives up; then both make one."""
    model, x = stack(2), own_batch()
    found: Found = {"type": None}
    with mock.patch.object(rank_group, "MEETING_SECONDS", 0.5):
        if dist.get_rank() == 0:
            found = raised(partial(rekindle.profile, model, x, loss=loss_of))
    dist.barrier()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    if dist.get_rank() == 0:  # a group of its own, so that nobody waits
        rekindle.profile(model, x, loss=loss_of, group=alone)
    return {"raised": found, "then": fitted(model, x)["same"]}


def in_a_collective() -> Found:
    """A rank fails in its forward, where the other waits for it to gather parameters."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = stack(3)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    model.blocks[1].register_forward_pre_hook(fail_on_one_rank)
    call = partial(rekindle.fit, model, own_batch(), "70%", loss=loss_of, group=group)
    return {"raised": raised(call), "then": _works()}


def other_call() -> Found:
    model, x = stack(2), own_batch()
    call = rekindle.profile if dist.get_rank() else partial(rekindle.fit, budget="70%")
    return {"raised": raised(partial(call, model, x, loss=loss_of))}


def stages_together() -> Found:
    """Without a group, stages of a pipeline are not one model."""
    return {"raised": raised(partial(rekindle.fit, stack(2 + dist.get_rank()), own_batch(), "70%"))}
