"""What the processes of `test_distributed.py` run: every case, in every way to hold activations.

One process imports torch and forks the ranks of a world of two and of one of four: `python -m`
this, with a folder for the results.
"""

import functools
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.functional import dropout, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle import policies
from tests.ranks import fork_ranks, process_group

DEPTH = 2
DIM = 8
HEADS = 4

COLLECTIVES = [
    f"_c10d_functional::{name}"
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
]

WAYS = ("checkpoint", "recompute", "policy", "spill")
"""`rekindle.checkpoint` called by the model, and what `apply` is given."""
_APPLIED: dict[str, Any] = {
    "recompute": "recompute",
    "policy": policies.keep_matmuls_and_attention,
    "policy and collectives": policies.keep_matmuls_and_attention | policies.keep(COLLECTIVES),
    "spill": rekindle.offload(tier="disk", quota=1.0, min_bytes=1),
}


class Attention(nn.Module):
    """Over as many heads as there are here: some of them, if the projections are split."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.out = nn.Linear(DIM, DIM)
        self.scale: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out if self.scale is None else out * self.scale


class FeedForward(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return self.down(dropout(gelu(self.up(x)), self.drop))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.mlp = FeedForward(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


Run = Callable[[nn.Module, Tensor], Tensor]


class Layers(nn.Module):
    """Layers in a row; `run(layer, x)` runs one."""

    def __init__(self, drop: float, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(drop) for _ in range(depth))
        self.run: Run = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return x


class Model(Layers):
    """A small transformer, with a part that is not used if asked for."""

    def __init__(self, drop: float = 0.0, unused: bool = False) -> None:
        super().__init__(drop, DEPTH)
        self.embed = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, DIM)
        self.unused = nn.Linear(DIM, DIM) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(self.embed(x)))  # type: ignore[no-any-return]


def hold(model: nn.Module, way: str, whole: bool = False) -> None:
    """Have a model's layers checkpointed, or give their activations fates; or the whole model's."""
    if way in _APPLIED:
        rekindle.apply(model, {"": _APPLIED[way]} if whole else _APPLIED[way])
        return
    for part in model.modules():
        if isinstance(part, Layers) and way == "checkpoint" and not whole:
            part.run = rekindle.checkpoint


class Collectives(TorchDispatchMode):
    """Notes every collective: its name, the shapes that it is given, and when it ran."""

    _SPACES = ("c10d", "_c10d_functional", "c10d_functional")
    _OTHERS = ("send", "recv", "wait_tensor", "barrier", "_wrap_tensor")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self.seen: list[str] = []
        self.model: nn.Module | None = None
        self.gathered = 0
        """The most of its parameters, in numbers, that were here at a matmul in backward."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its local tensors is what we want to see
        name = func._overloadpacket.__name__ if hasattr(func, "_overloadpacket") else ""
        if getattr(func, "namespace", "") in self._SPACES and not name.startswith(self._OTHERS):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
            when = "replay" if rekindle.is_recomputing() else self.phase
            self.seen.append(f"{when} {name} {shapes}")
        if name in ("mm", "addmm") and self.phase == "backward" and self.model is not None:
            here = (p.numel() for p in self.model.parameters() if not isinstance(p, DTensor))
            self.gathered = max(self.gathered, sum(here))
        return func(*args, **(kwargs or {}))


GATHERS = ("_allgather_base_", "all_gather_into_tensor")


def counted(seen: list[str], *names: str) -> tuple[int, int, int]:
    """How many collectives of a kind there were in forward, in replays and in the rest."""
    found = Counter(
        when for when, name, _ in (line.split(" ", 2) for line in seen) if name in names
    )
    return found["forward"], found["replay"], found["backward"]


@dataclass
class Outcome:
    """What a rank got."""

    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    """Of every step, this rank's part."""
    collectives: list[str] = field(default_factory=list)
    """Of the last step, in order."""
    gathered: int = 0
    """The most parameters that were not sharded at a time in its backward, in numbers."""
    forwards: int = 0
    """Calls of regions in the last step."""
    replays: int = 0
    ops_replayed: int = 0
    spilled: int = 0
    error: str = ""


def local_grads(model: nn.Module) -> dict[str, Tensor | None]:
    def local(grad: Tensor | None) -> Tensor | None:
        if isinstance(grad, DTensor):
            grad = grad.to_local()
        return None if grad is None else grad.detach().clone()

    return {name: local(p.grad) for name, p in model.named_parameters()}


Step = Callable[[int, Collectives], None]


def train(model: nn.Module, step: Step, outcome: Outcome, steps: int = 2) -> None:
    """Some steps; the last one is looked at, the others run as a user's do."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    torch.manual_seed(100 + dist.get_rank())
    for number in range(steps):
        optimizer.zero_grad()
        collectives = Collectives()
        if number < steps - 1:
            step(number, collectives)
        else:
            with rekindle.observe() as seen, collectives:
                step(number, collectives)
            outcome.forwards, outcome.replays = seen.total.forwards, seen.total.replays
            outcome.ops_replayed, outcome.spilled = seen.total.ops_replayed, seen.spill.tensors_out
            outcome.collectives, outcome.gathered = collectives.seen, collectives.gathered
        outcome.grads.append(local_grads(model))
        optimizer.step()


def plain_step(model: Callable[[Tensor], Tensor], batch: Callable[[], Tensor]) -> Step:
    def step(number: int, collectives: Collectives) -> None:
        collectives.phase = "forward"
        loss = model(batch()).square().sum()
        collectives.phase = "backward"
        loss.backward()

    return step


def own_batch() -> Tensor:
    """Another one for each rank."""
    return torch.randn(2, 3, DIM)


def seeded_batch(seed: int) -> Callable[[], Tensor]:
    """The same for all ranks with the same seed: those that share a batch."""
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.randn(2, 4, DIM, generator=generator)


@dataclass(frozen=True)
class Case:
    """One way to spread a model over `world` ranks."""

    name: str
    world: int
    run: Callable[[str, Outcome], None] = field(compare=False)
    ways: tuple[str, ...] = WAYS
    alike: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks whose collectives are the same ones in the same order."""
    alone: bool = False
    """Whether it has processes of its own: a case that may end them."""

    def __str__(self) -> str:
        return self.name


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
    """What is sharded as a unit, the root aside."""
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


def _ddp_cases() -> Iterator[Case]:
    for find_unused, static, accumulate in product([False, True], repeat=3):
        if find_unused and static:
            continue  # the latter makes the former of no account
        names = {"find unused": find_unused, "static": static, "accumulate": accumulate}
        first = find_unused != accumulate  # every flag with either order
        name = ", ".join([*(n for n, on in names.items() if on), _order(first, "wrapped")])
        run = functools.partial(ddp, find_unused, static, accumulate, first)
        # `checkpoint` with these flags: test_ddp.py
        yield Case(f"ddp: {name}", 2, run, ("recompute", "policy", "spill"), ((0, 1),))


def _order(first: bool, done: str) -> str:
    return f"applied, then {done}" if first else f"{done}, then applied"


def _fsdp_cases() -> Iterator[Case]:
    for unit, reshard in product(["layer", "part", "root"], [True, False]):
        run = functools.partial(fsdp, unit, False, reshard_after_forward=reshard)
        ways = ("checkpoint", "recompute", "policy")
        yield Case(_fsdp_name(unit, reshard), 2, run, ways, ((0, 1),))
    for unit in ("layer", "part"):
        name = f"fsdp: unit {unit}, {_order(True, 'sharded')}"
        run = functools.partial(fsdp, unit, True)
        yield Case(name, 2, run, ("recompute", "policy", "spill"), ((0, 1),))
    for reshard in (True, False):
        run = functools.partial(fsdp, "layer", False, whole=True, reshard_after_forward=reshard)
        name = _fsdp_name("layer", reshard, whole=True)
        yield Case(name, 2, run, ("checkpoint", "recompute", "policy"), ((0, 1),))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    more: list[tuple[str, str, dict[str, Any]]] = [
        ("layer", "accumulate", {"accumulate": True}),
        ("part", "frozen", {"frozen": True}),
        ("layer", "bfloat16", {"mp_policy": mixed}),
        ("part", "bfloat16", {"mp_policy": mixed}),
    ]
    for unit, name, options in more:
        run = functools.partial(fsdp, unit, False, **options)
        yield Case(f"fsdp: unit {unit}, {name}", 2, run, alike=((0, 1),))
    four = ((0, 1, 2, 3),)
    yield Case("hsdp", 4, functools.partial(fsdp, "layer", False, mesh=hybrid), alike=four)


def _fsdp_name(unit: str, reshard: bool, whole: bool = False) -> str:
    return f"fsdp: unit {unit}, reshard {reshard}{', one region' * whole}"


def _tensor_parallel_cases() -> Iterator[Case]:
    ways = (*WAYS, "policy and collectives")
    for sequence in (False, True):
        first = not sequence
        name = f"tp:{' sequence,' * sequence} {_order(first, 'split')}"
        yield Case(name, 2, functools.partial(tensor_parallel, sequence, first), ways, ((0, 1),))
    four = ((0, 1, 2, 3),)
    run = functools.partial(tensor_parallel, False, False)
    yield Case("tp: 4 ranks", 4, run, ("checkpoint", "recompute", "policy"), four)
    for both in (False, True):
        run = functools.partial(fsdp_and_tensor_parallel, both, both)
        name = "fsdp+tp: sequence, reshard True" if both else "fsdp+tp: reshard False"
        yield Case(name, 4, run, alike=four)
    yield Case("ddp+tp", 4, ddp_and_tensor_parallel, alike=four)


def _pipeline_cases() -> Iterator[Case]:
    ways = ("checkpoint", "recompute", "policy")
    yield Case("pp: 1F1B", 2, functools.partial(pipeline, Schedule1F1B, False))
    schedule: Schedule = ScheduleInterleavedZeroBubble
    run = functools.partial(pipeline, schedule, False)
    yield Case("pp: zero bubble, no groups", 2, run, ("recompute", "policy", "spill"))
    yield Case("pp: zero bubble, groups", 2, functools.partial(pipeline, schedule, True), ways)
    run = functools.partial(pipeline, schedule, True, also=sharded_stage)
    yield Case("pp+fsdp: zero bubble, groups", 4, run, ways, ((0, 1), (2, 3)))
    if Version(torch.__version__) >= Version("2.13"):  # before, a rank cannot send to itself (gloo)
        run = functools.partial(pipeline, ScheduleZBVZeroBubble, True)
        yield Case("pp: V-shaped zero bubble, groups", 2, run, ways)


CASES = [*_ddp_cases(), *_fsdp_cases(), *_tensor_parallel_cases(), *_pipeline_cases()]


def outcome_of(case: Case, way: str) -> Outcome:
    outcome = Outcome()
    torch.manual_seed(0)
    try:
        case.run(way, outcome)
    except Exception:  # noqa: BLE001  (one test shows it; the other cases run)
        outcome.error = traceback.format_exc()
    return outcome


@dataclass(frozen=True)
class World:
    """Ranks that run their cases one after the other."""

    size: int
    alone: bool

    def file(self, folder: Path, rank: int) -> Path:
        return folder / f"{self.size}{'-alone' * self.alone}-{rank}.pt"

    def work(self, rank: int, folder: Path) -> None:
        """Run every case, and leave the results in a file."""
        warnings.simplefilter("ignore")
        results: dict[tuple[str, str], Any] = {}
        with process_group(rank, self.size, self.file(folder, 0).with_suffix(".rendezvous")):
            for case in CASES:
                if world_of(case) == self:
                    for way in ("plain", *case.ways):
                        results[case.name, way] = vars(outcome_of(case, way))
                        if self.alone:
                            torch.save(results, self.file(folder, rank))
        torch.save(results, self.file(folder, rank))


def world_of(case: Case) -> World:
    return World(case.world, case.alone)


WORLDS = [World(2, alone=False), World(4, alone=False), World(2, alone=True)]


def launch(folder: Path) -> None:
    """All worlds at the same time: ranks wait for each other often."""
    fork_ranks(
        functools.partial(world.work, rank, folder)
        for world in WORLDS
        for rank in range(world.size)
    )


if __name__ == "__main__":
    launch(Path(sys.argv[1]))
