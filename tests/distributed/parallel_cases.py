"""The cases of `test_parallel.py`: each way to spread a model, with its options."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from packaging.version import Version
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from tests.distributed.parallel_model import WAYS, Outcome
from tests.distributed.parallel_runs import (
    Schedule,
    ddp,
    ddp_and_tensor_parallel,
    fsdp,
    fsdp_and_tensor_parallel,
    hybrid,
    pipeline,
    sharded_stage,
    tensor_parallel,
)


@dataclass(frozen=True)
class Case:
    """One way to spread a model over `world` ranks."""

    name: str
    world: int
    run: Callable[[str, Outcome], None] = field(compare=False)
    ways: tuple[str, ...] = WAYS
    alike: tuple[tuple[int, ...], ...] = ()
    """Groups of ranks whose collectives are the same ones in the same order."""

    def __str__(self) -> str:
        return self.name


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
