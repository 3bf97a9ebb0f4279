"""Cases of `test_rank_sync.py`: budgets, profiles, solvers, groups and wrappers that differ."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import rekindle
from rekindle.planner.solve import solver
from rekindle.strategy import Keep
from tests.planner.ranks.rank_helpers import (
    DIM,
    TOKENS,
    Found,
    facts_of,
    fitted,
    gradients,
    local,
    loss_of,
    own_batch,
    same,
    sharded,
    stack,
)
from tests.toys import Block, Stack


def budgets_differ(wrap: Callable[[nn.Module], nn.Module], x: Tensor | None = None) -> Found:
    model, x = wrap(stack()), own_batch() if x is None else x
    profile = rekindle.profile(model, x, loss=loss_of)
    budgets = [rekindle.solve(profile, share).budget for share in ("80%", "65%")]
    found = fitted(model, x, budgets[dist.get_rank() % 2], profile=profile)
    return {**found, "smallest": found["plan"]["budget"] == budgets[1]}


def split(model: nn.Module) -> nn.Module:
    """With tensor parallelism: blocks sum up over ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


def share_and_bytes() -> Found:
    """One rank asks for a share, the other for bytes."""
    model, x = DistributedDataParallel(stack()), own_batch()
    return fitted(model, x, "70%" if dist.get_rank() == 1 else "1GiB")


def solver_differs() -> Found:
    """On one rank the solver, out of time, finds other plans; the first one's counts."""
    model, x = DistributedDataParallel(stack()), own_batch()

    def hasty(profile: rekindle.Profile, budget: int) -> Any:
        return solver.least_peak(profile)

    if dist.get_rank() == 1:
        with mock.patch.object(solver, "choose", hasty):
            return fitted(model, x)
    return fitted(model, x)


def solved_together() -> Found:
    """`solve` and `frontier` with a group, for budgets and profiles that differ."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = stack()
    profile = rekindle.profile(model, own_batch(), loss=loss_of, group=alone)
    common = rekindle.profile(model, own_batch(), loss=loss_of)
    share = ["80%", "70%"][dist.get_rank()]
    plan = rekindle.solve(common, share, group=dist.group.WORLD)
    points = rekindle.frontier(common, 3, group=dist.group.WORLD)
    return {
        "profiles": common.static_bytes == profile.static_bytes,
        "plan": [[path, option.describe()] for path, _, option in plan.blocks],
        "budget": plan.budget == rekindle.solve(common, "70%").budget,
        "points": [[point.peak, point.seconds] for point in points],
    }


def batches_differ() -> Found:
    """The profile is that of the rank with the most."""
    model = DistributedDataParallel(stack())
    x = own_batch(TOKENS * (1 + dist.get_rank()))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    own = rekindle.profile(stack(), x, loss=loss_of, group=alone)
    profile = rekindle.profile(model, x, loss=loss_of)
    keep = [option for option in profile.blocks[0].candidates if option.strategy == Keep()]
    plain = [option for option in own.blocks[0].candidates if option.strategy == Keep()]
    found = fitted(model, x, "70%", profile=profile)
    del found["plan"]["near"]
    return {
        **found,
        "inputs": profile.inputs,
        "held": keep[0].bytes_held,
        "own": plain[0].bytes_held,
        "batch": profile.batch,
    }


def pipeline(schedule: Callable[..., Any]) -> Found:
    """Stages of other depths, each fitted by its own ranks alone."""
    width = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, width), mesh_dim_names=("pipe", "data"))
    rank = mesh.get_local_rank("pipe")
    torch.manual_seed(rank)
    module: nn.Module = Stack(2 + 2 * rank, DIM)
    if width > 1:
        module = sharded(module, mesh=mesh["data"])
    torch.manual_seed(7)
    x, target = torch.randn(4 * TOKENS, DIM), torch.randn(4 * TOKENS, DIM)

    def gradients() -> list[Tensor | None]:
        module.zero_grad()
        stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=mesh.get_group("pipe"))
        steps = schedule(stage, 4, loss_fn=nn.functional.mse_loss)
        steps.step(*([] if rank else [x]), target=target)
        return [None if p.grad is None else local(p.grad).clone() for p in module.parameters()]

    expected = gradients()
    group = mesh["data"] if width > 1 else mesh.get_group("data")
    plan = rekindle.fit(module, x[:TOKENS], "70%", loss=loss_of, group=group)
    return {"plan": facts_of(plan), "same": same(gradients(), expected), "depth": len(plan.blocks)}


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp": sharded,
}


def moved(folder: Path) -> Found:
    """A plan that was made in one wrapper is applied in every other, from a file too."""
    x = own_batch()
    found: Found = {"same": True, "plans": [], "kinds": []}
    for first, wrap in WRAPPERS.items():
        model = wrap(stack(2))
        profile = rekindle.profile(model, x, loss=loss_of)
        plan = rekindle.fit(model, x, "70%", loss=loss_of, profile=profile)
        path = folder / f"{first}-{dist.get_rank()}.json"
        plan.save(path)
        found["plans"].append([plan.model, [path for path, _, _ in plan.blocks]])
        found["kinds"].append(profile.blocks[0].signature)
        for other in WRAPPERS.values():
            model = other(stack(2))
            expected = gradients(model, x)
            rekindle.apply(model, rekindle.Plan.load(path))
            with rekindle.observe() as seen:
                found["same"] &= same(gradients(model, x), expected)
            found["same"] &= rekindle.plan_of(model) == plan and seen.total.forwards > 0
    inner = stack(2)
    rekindle.apply(inner, plan)
    found["seen through"] = rekindle.plan_of(DistributedDataParallel(inner)) is plan
    return found


def lone_block() -> Found:
    """A model that is one block itself: the wrapper is none."""
    torch.manual_seed(0)
    model, x = DistributedDataParallel(Block(DIM)), own_batch()
    expected = gradients(model, x)
    profile = rekindle.profile(model, x, loss=loss_of)
    plan = rekindle.solve(profile, "95%")
    rekindle.apply(model, plan)
    kinds = [[path, kind] for path, kind, _ in plan.blocks]
    return {"blocks": kinds, "same": same(gradients(model, x), expected)}
