"""Host time of a selective region per op: `scripts/bench ops [--json PATH]`.

A decoder block of tiny tensors, whose time is almost all Python and dispatch, runs forward and
backward. Its matrix products and its attention are kept, in every way to say so. A figure is the
time over the plain block's, divided by the number of ops that the plain forward dispatches.
Backward includes the ops that run again. The floor is what torch takes to call a dispatch mode and
a pair of saved-tensor hooks that do nothing but pass everything on, and makes nothing again.
"""

import argparse
import copy
import gc
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from benchmarks.decoder import SHAPES, Block
from benchmarks.measure import collected_by_hand, format_table, save_json
from rekindle import policies
from rekindle.planner.devices import device_named
from rekindle.planner.trace.block_trace import record
from rekindle.regions.selective.op_names import name_of
from rekindle.strategy import NumberedOps, PlannedOps

Run = Callable[[Tensor], Tensor]

PLAIN = "plain"
FLOOR = "a mode and hooks that do nothing"
_KEPT = policies.MATMULS | policies.ATTENTION


class Count(TorchDispatchMode):
    """Passes ops on, and counts them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ops += 1
        return func(*args, **kwargs) if kwargs else func(*args)


@dataclass(frozen=True)
class Cost:
    """What an op costs over a plain run, in microseconds: from the medians over rounds."""

    forward_us: float
    backward_us: float
    ops_again: int
    """Number of ops that backward runs more than the plain one."""


def _keep(_ctx: object, op: Any, *_args: object, **_kwargs: object) -> bool:
    return op.overloadpacket in _KEPT


def runs(block: Block, x: Tensor) -> dict[str, Run]:
    """The block as it is and under each strategy."""
    names = {name_of(op) for op in _KEPT}
    kept = [
        op
        for op in record(lambda: block(x), device_named("cpu"), block).ops
        if op.name.partition(".")[0] in names
    ]
    by_address = PlannedOps(tuple(op.address for op in kept if op.address is not None))
    by_number = NumberedOps(tuple(op.number for op in kept))

    def do_nothing(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved), Count():
            out: Tensor = block(x)
        return out

    def under(strategy: Any) -> Run:
        managed = copy.deepcopy(block)
        rekindle.apply(managed, {"": strategy})
        return managed

    def by_contexts(policy: Any) -> Run:
        def contexts() -> Any:
            return rekindle.create_selective_checkpoint_contexts(policy)

        return lambda x: rekindle.checkpoint(block, x, context_fn=contexts)

    return {
        PLAIN: block,
        FLOOR: do_nothing,
        "recompute": under("recompute"),
        "keep by address, as plans do": under(by_address),
        "keep by number": under(by_number),
        "keep a list of ops": by_contexts(list(_KEPT)),
        "keep by a function": by_contexts(_keep),
    }


def measure(seconds: float) -> tuple[int, dict[str, Cost]]:
    """The number of ops of the plain forward, and what one costs under each strategy."""
    shape = SHAPES["tiny"]
    block = Block(shape, dtype=torch.float32)
    x = shape.hidden_states(dtype=torch.float32).requires_grad_()
    grad = torch.ones_like(x)
    candidates = runs(block, x)
    with Count() as forward:
        block(x)
    again = {name: _ops_of_backward(run, x, grad) for name, run in candidates.items()}
    times = _interleaved(candidates, x, grad, seconds)

    def per_op(name: str, part: int) -> float:
        mine, plain = (median(taken[part] for taken in times[each]) for each in (name, PLAIN))
        return round((mine - plain) / forward.ops * 1e6, 2)

    costs = {
        name: Cost(per_op(name, 0), per_op(name, 1), again[name] - again[PLAIN])
        for name in candidates
        if name != PLAIN
    }
    return forward.ops, costs


def _ops_of_backward(run: Run, x: Tensor, grad: Tensor) -> int:
    out = run(x)
    with Count() as count:
        out.backward(grad)
    return count.ops


def _interleaved(
    candidates: dict[str, Run], x: Tensor, grad: Tensor, seconds: float
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of forward and of backward, round by round: as `benchmarks.measure.interleaved`."""

    def step(run: Run) -> tuple[float, float]:
        start = time.perf_counter()
        out = run(x)
        middle = time.perf_counter()
        out.backward(grad)
        return middle - start, time.perf_counter() - middle

    for run in candidates.values():
        for _ in range(20):
            step(run)
    names, order = list(candidates), random.Random(0)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with collected_by_hand():
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times[PLAIN]) < 5:
            order.shuffle(names)
            for name in names:
                step(candidates[name])  # to warm the caches
                times[name].append(step(candidates[name]))
            gc.collect()
    return times


def format_costs(ops: int, costs: dict[str, Cost]) -> str:
    rows = [
        [
            name,
            f"{cost.forward_us:.1f}",
            f"{cost.backward_us:.1f}",
            f"{cost.forward_us + cost.backward_us:.1f}",
            str(cost.ops_again),
        ]
        for name, cost in costs.items()
    ]
    heads = [f"µs an op over plain, of {ops} ops", "forward", "backward", "both", "ops again"]
    return format_table(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="The host cost of an op in a selective region.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    parser.add_argument("--seconds", type=float, default=15.0, help="of all rows (%(default)s)")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    ops, costs = measure(options.seconds)
    print(format_costs(ops, costs))
    if options.json:
        results = {"ops": ops, "costs": {name: asdict(cost) for name, cost in costs.items()}}
        save_json(options.json, "ops", results)


if __name__ == "__main__":
    main()
