"""Ways to spread the model over ranks: DDP, FSDP2, tensor and pipeline parallelism."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import rekindle
from tests.distributed.parallel_model import (
    DIM,
    Attention,
    Collectives,
    FeedForward,
    Layers,
    Model,
    Outcome,
    hold,
    own_batch,
    plain_step,
    seeded_batch,
    train,
)


def ddp(
    find_unused: bool, static: bool, accumulate: bool, first: bool, way: str, outcome: Outcome
) -> None:
    """DDP; `first`: fates are given before the model is wrapped."""
    model = Model(drop=0.2, unused=find_unused or static)
    if first:
        hold(model, way)
    parallel = DistributedDataParallel(
        model, find_unused_parameters=find_unused, static_graph=static, bucket_cap_mb=0.001
    )
    if not first:
        hold(parallel, way)

    def step(number: int, collectives: Collectives) -> None:
        # DDP cannot have its first backward under `no_sync` with a static graph.
        parts = 2 if accumulate and not (static and number == 0) else 1
        for left in reversed(range(parts)):
            with parallel.no_sync() if left else nullcontext():
                plain_step(parallel, own_batch)(number, collectives)

    train(model, step, outcome, steps=3)  # a static graph is learnt in the first


def units_of(model: Model, unit: str) -> list[nn.Module]:
    """The modules that are sharded as a unit, the root aside."""
    if unit == "layer":
        return list(model.layers)
    if unit == "part":
        return [part for part in model.modules() if isinstance(part, Attention | FeedForward)]
    return []


def shard(model: Model, unit: str, **options: Any) -> None:
    for module in units_of(model, unit):
        fully_shard(module, **options)
    fully_shard(model, **options)


def fsdp(
    unit: str,
    first: bool,
    way: str,
    outcome: Outcome,
    accumulate: bool = False,
    frozen: bool = False,
    whole: bool = False,
    scaled: bool = False,
    mesh: Callable[[], DeviceMesh] | None = None,
    **options: Any,
) -> None:
    """FSDP2; `first`: fates are given before the model is sharded; `whole`: the model is a region.

    A region that `checkpoint` makes is around the hooks of FSDP, one of `apply` is inside of them.
    """
    model = Model(drop=0.2)
    if scaled:  # a weight that something cheap needs, which policies make again
        for part in model.modules():
            if isinstance(part, Attention):
                part.scale = nn.Parameter(torch.rand(DIM))
    if frozen:
        for name, module in model.named_modules():
            if name.endswith(("mlp.up", "attention.q", "embed")):
                module.requires_grad_(False)
    if first:
        hold(model, way, whole)
    shard(model, unit, mesh=None if mesh is None else mesh(), **options)
    if not first:
        hold(model, way, whole)
    run: Callable[[Tensor], Tensor] = model
    if whole and way == "checkpoint":
        run = functools.partial(rekindle.checkpoint, model)

    def step(number: int, collectives: Collectives) -> None:
        collectives.model = model
        for left in reversed(range(2 if accumulate else 1)):
            model.set_requires_gradient_sync(not left)  # type: ignore[operator]
            plain_step(run, own_batch)(number, collectives)

    train(model, step, outcome)


def split(model: Model, mesh: DeviceMesh, sequence: bool) -> None:
    """Split projections over ranks; with `sequence`, norms and what is between layers too."""
    local = {
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
    }
    if not sequence:
        plan = {**local, "attention.out": RowwiseParallel(), "mlp.down": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, mesh, plan)
        return
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    between = {
        **local,
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": whole,
        "mlp": whole,
        "attention.out": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, between)
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            ),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )


def tensor_parallel(sequence: bool, first: bool, way: str, outcome: Outcome) -> None:
    model = Model()
    if first:
        hold(model, way)
    split(model, init_device_mesh("cpu", (dist.get_world_size(),)), sequence)
    if not first:
        hold(model, way)
    train(model, plain_step(model, seeded_batch(0)), outcome)


def _two_by_two(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def hybrid() -> DeviceMesh:
    return _two_by_two("replicate", "shard")


def fsdp_and_tensor_parallel(sequence: bool, reshard: bool, way: str, outcome: Outcome) -> None:
    mesh = _two_by_two("data", "tensor")
    model = Model()
    split(model, mesh["tensor"], sequence)
    hold(model, way)
    shard(model, "layer", mesh=mesh["data"], reshard_after_forward=reshard)
    train(model, plain_step(model, seeded_batch(mesh.get_local_rank("data"))), outcome)


def ddp_and_tensor_parallel(way: str, outcome: Outcome) -> None:
    mesh = _two_by_two("data", "tensor")
    model = Model()
    split(model, mesh["tensor"], sequence=False)
    hold(model, way)
    _pre_dp_module_transform(model)
    parallel = DistributedDataParallel(model, process_group=mesh["data"].get_group())
    train(parallel, plain_step(parallel, seeded_batch(mesh.get_local_rank("data"))), outcome)


class Stage(PipelineStage):
    """A stage whose calls of backward for one micro-batch are one exec group."""

    def __init__(self, *args: Any, grouped: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grouped = grouped
        self._groups: dict[int, rekindle.GraphExecGroup] = {}

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if not self._grouped:
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        with self._groups.setdefault(bwd_chunk_id, rekindle.GraphExecGroup()):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if not self._grouped:
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        with self._groups.pop(bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


MICRO_BATCHES = 4
STAGES = 4
Schedule = Callable[..., Any]


def pipeline(
    schedule: Schedule,
    grouped: bool,
    way: str,
    outcome: Outcome,
    also: Callable[[nn.Module, DeviceMesh], None] | None = None,
) -> None:
    """A pipeline over 2 ranks, of 4 stages, or of 2; `also`: each stage is spread as well."""
    width = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, width), mesh_dim_names=("pipe", "other"))
    rank = mesh.get_local_rank("pipe")
    group = mesh["pipe"].get_group()
    if schedule is Schedule1F1B:
        mine, count = [rank], 2
    elif schedule is ScheduleZBVZeroBubble:
        mine, count = [rank, STAGES - 1 - rank], STAGES
    else:
        mine, count = [rank, rank + 2], STAGES
    parts = [Layers(0.0, depth=2) for _ in range(count)]
    owned = nn.ModuleDict({str(i): parts[i] for i in mine})
    for part in owned.values():
        if also is not None:
            also(part, mesh["other"])
        hold(part, way)
    stages = [
        Stage(parts[i], i, count, torch.device("cpu"), group=group, grouped=grouped) for i in mine
    ]
    run = schedule(
        stages[0] if count == 2 else stages,
        MICRO_BATCHES,
        loss_fn=lambda y, target: (y - target).square().sum(),
        scale_grads=False,
    )
    shape = MICRO_BATCHES * 2, 3, DIM
    generator = torch.Generator().manual_seed(mesh.get_local_rank("other"))

    def step(number: int, collectives: Collectives) -> None:
        x, target = (torch.randn(shape, generator=generator) for _ in range(2))
        run.step(*([x] if 0 in mine else []), target=target if count - 1 in mine else None)

    train(owned, step, outcome)


def sharded_stage(part: nn.Module, mesh: DeviceMesh) -> None:
    for layer in part.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(part, mesh=mesh, reshard_after_forward=False)
