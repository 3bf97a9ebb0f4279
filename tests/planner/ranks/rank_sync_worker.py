"""Ranks that plan together, in every way in which they may differ; each writes what it found.

One process imports torch and forks the ranks of a world of two and of one of four: `python -m`
this, with a folder for the results.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import rekindle
from rekindle.planner.measure.block_benchmark import BlockBenchmark
from rekindle.planner.ranks import rank_group
from rekindle.planner.solve import solver
from rekindle.planner.types import BlockProfile, Candidate
from rekindle.strategy import Keep, Recompute, Selective, Strategy
from tests.ranks import fork_ranks, process_group
from tests.toys import Block, Stack

DIM = 16
TOKENS = 512
Found = dict[str, Any]


def own_batch(tokens: int = TOKENS) -> Tensor:
    """Numbers that differ from rank to rank."""
    torch.manual_seed(100 + dist.get_rank())
    return torch.randn(tokens, DIM)


def stack(depth: int = 4) -> Stack:
    torch.manual_seed(0)
    return Stack(depth, DIM)


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean()


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    loss = loss_of(model(x))
    local(loss).backward() if isinstance(loss, DTensor) else loss.backward()
    return [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


def told(plan: rekindle.Plan) -> Found:
    """What has to be the same on all ranks."""
    assert plan.measured_peak is not None
    return {
        "blocks": [[path, option.describe()] for path, _, option in plan.blocks],
        "budget": plan.budget,
        "fits": plan.measured_peak <= plan.budget,
        "measured": [plan.measured_peak, plan.measured_time],
        "predicted": [plan.predicted_peak, plan.predicted_time],
        "near": str([plan.less, plan.more]),
    }


def fitted(model: nn.Module, x: Tensor, budget: int | str = "70%", **options: Any) -> Found:
    """A model is fitted, and has the gradients that it had.

    From its second step on: then DDP has its buckets, and so sums in the same order.
    """
    gradients(model, x)
    expected = gradients(model, x)
    plan = rekindle.fit(model, x, budget, loss=loss_of, **options)
    found = {"plan": told(plan), "same": same(gradients(model, x), expected)}
    rekindle.remove(model)
    return found


# Budgets, profiles, plans


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
        return solver.smallest(profile)

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


# Errors


def raised(call: Callable[[], Any]) -> Found:
    start = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is
        quick = time.monotonic() - start < 60
        return {"type": type(error).__name__, "text": str(error), "quick": quick}
    return {"type": None}


def on_one_rank(bad: Any, good: Any) -> Any:
    return bad if dist.get_rank() == 1 else good


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
        call = partial(rekindle.fit, model, x, on_one_rank(1000, "70%"), loss=loss_of)
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


# Other blocks, other ops


class Skipping(Stack):
    """Leaves a block out on one rank."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        for i, block in enumerate(self.blocks):
            if i != 1 + dist.get_rank():
                x = block(x)
        return x


class Experts(nn.Module):
    """Sends each token to one of some experts; one without tokens is not run."""

    def __init__(self, all_have_gradients: bool, count: int = 3) -> None:
        super().__init__()
        self.all_have_gradients = all_have_gradients
        self.experts = nn.ModuleDict({str(i): Block(DIM) for i in range(count)})

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long() if dist.get_rank() else x[:, 0].sign().long() + 1
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts.values()):
            at = (chosen == i).nonzero().flatten()
            if len(at):
                out = out.index_add(0, at, expert(x[at]))
            elif self.all_have_gradients:
                out = out + 0 * sum(p.sum() for p in expert.parameters())
        return x + out


class Routed(nn.Module):
    """Layers of experts."""

    def __init__(self, all_have_gradients: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(Experts(all_have_gradients), nn.LayerNorm(DIM)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


finding_unused = partial(DistributedDataParallel, find_unused_parameters=True)


def skipped() -> Found:
    torch.manual_seed(0)
    model = finding_unused(Skipping(4, DIM))
    x = own_batch()
    expected = gradients(model, x)
    plan = rekindle.fit(model, x, "70%", loss=loss_of)
    return {"plan": told(plan), "same": same(gradients(model, x), expected)}


def experts(wrap: Callable[[nn.Module], nn.Module], all_have_gradients: bool) -> Found:
    """On one rank, an expert has no tokens."""
    torch.manual_seed(0)
    model = wrap(Routed(all_have_gradients))
    x = own_batch()
    if not dist.get_rank():
        x[0, 0], x[1, 0], x[2, 0] = -1, 0, 1
    expected = gradients(model, x)
    profile = rekindle.profile(model, x, loss=loss_of)
    found: Found = {"same": True, "fits": True, "blocks": []}
    for share in ("85%", "70%"):
        plan = rekindle.fit(model, x, share, loss=loss_of, profile=profile)
        found["same"] &= same(gradients(model, x), expected)
        assert plan.measured_peak is not None
        found["fits"] &= plan.measured_peak <= plan.budget
        found["blocks"].append([type(option.strategy).__name__ for _, _, option in plan.blocks])
    counts = {
        address.count
        for o in profile.blocks[0].candidates
        if isinstance(o.strategy, Selective)
        for address in o.strategy.policy.kept
    }
    return {
        **found,
        "fates": [type(o.strategy).__name__ for o in profile.blocks[0].candidates],
        "counts": len(counts),
    }


class Split(nn.Module):
    """A block of tensor parallelism that is given, and returns, sharded tensors."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(1)
        up, down = torch.randn(DIM, 2 * DIM) / 8, torch.randn(2 * DIM, DIM) / 8
        self.up = nn.Parameter(distribute_tensor(up, mesh, [Shard(1)]))
        self.down = nn.Parameter(distribute_tensor(down, mesh, [Shard(0)]))
        self.inner = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x @ self.up) @ self.down
        assert isinstance(out, DTensor)
        return x + out.redistribute(placements=[Replicate()])


class SplitStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Split() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Any = DTensor.from_local(x, self.blocks[0].up.device_mesh, [Replicate()])
        for block in self.blocks:
            out = block(out)
        return out.to_local()


def sharded_outputs() -> Found:
    torch.manual_seed(0)
    return fitted(SplitStack(), torch.randn(TOKENS, DIM))


def hooks_that_shard() -> Found:
    """Blocks whose hooks make sharded tensors of what they are given, and return such."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded_input(_block: nn.Module, args: Any, mesh: DeviceMesh) -> Any:
        return (DTensor.from_local(args[0], mesh, [Replicate()]),)

    class Gathering(Stack):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            for block in self.blocks:
                x = block(x).to_local()
            return x

    torch.manual_seed(0)
    model = Gathering(3, DIM)
    for block in model.blocks:
        distribute_module(block, mesh, input_fn=sharded_input)
    return fitted(model, torch.ones(TOKENS, DIM))


# Groups


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
    return {"plan": told(plan), "same": same(gradients(), expected), "depth": len(plan.blocks)}


def stages_together() -> Found:
    """Without a group, stages of a pipeline are not one model."""
    return {"raised": raised(partial(rekindle.fit, stack(2 + dist.get_rank()), own_batch(), "70%"))}


# Wrappers


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """By FSDP2, each block as a unit."""
    for block in next(model.children()):
        fully_shard(block, **options)
    return fully_shard(model, **options)


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


def work(rank: int, world: int, folder: Path, only: str) -> None:
    results: dict[str, Found] = {}
    with process_group(rank, world, folder / f"rendezvous-{world}"):
        for name, case in WORLDS[world](folder).items():
            if only not in name:
                continue
            try:
                results[name] = case()
            except Exception:  # noqa: BLE001 - the test says so
                results[name] = {"failed": traceback.format_exc()}
            (folder / f"{world}-{rank}.json").write_text(json.dumps(results))
            dist.barrier()


def launch(folder: Path, only: str = "") -> int:
    return sum(
        fork_ranks(partial(work, rank, world, folder, only) for rank in range(world))
        for world in WORLDS
    )


if __name__ == "__main__":
    sys.exit(launch(Path(sys.argv[1]), *sys.argv[2:]))
