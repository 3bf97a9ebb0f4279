"""Runs the cases of `test_reducers.py`: ranks plan where gradients are reduced.

Each case trains a model twice from the same start, once with `fit` in the middle and once without:
what comes out has to be the same, bit for bit.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import scipy.optimize  # noqa: F401  (once, before ranks are forked)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rekindle
from rekindle.planner.instruments.memory_meter import bytes_of
from tests.ranks import Cases, local, run_worlds
from tests.storages import PolledBytes

WORLD = 2
DIM, HIDDEN, BLOCKS = 16, 32, 3


class Net(nn.Module):
    """Blocks between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM))
            for _ in range(BLOCKS)
        )
        self.last = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(number: int) -> Tensor:
    """A batch that is another on each rank."""
    generator = torch.Generator().manual_seed(WORLD * number + dist.get_rank())
    return torch.randn(64, DIM, generator=generator)


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


def backward(model: nn.Module, number: int) -> None:
    loss(model(batch(number))).backward()


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(steps):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()


def values_of(model: nn.Module) -> list[Tensor]:
    """Parameters, and their gradients where there are some."""
    parameters = list(model.parameters())
    found = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    return [local(tensor).detach().clone() for tensor in found]


Fit = Callable[[nn.Module], object]


def fit(model: nn.Module) -> rekindle.Plan:
    return rekindle.fit(model, batch(9), "80%", loss=loss)


def no_fit(_model: nn.Module) -> None:
    pass


# DDP


def inside_ddp(fit: Fit, how: str, **options: Any) -> list[Tensor]:
    """Fitted before the first step: the wrapper, the module in it, or a function that calls it."""
    model = DistributedDataParallel(net(), **options)
    if how == "function" and fit is not no_fit:
        rekindle.fit(model.module, lambda: loss(model(batch(9))), "80%")
    else:
        fit(model if how == "wrapper" else model.module)
    train(model)
    return values_of(model)


def replicated(fit: Fit, **options: Any) -> list[Tensor]:
    """Fitted before the first step, in which `replicate` makes the DDP that it has inside."""
    model = replicate(net(), **options)
    fit(model)
    train(model)
    return values_of(model)


def between_steps(fit: Fit, **options: Any) -> list[Tensor]:
    """Fitted after two steps whose gradients are still there."""
    model = DistributedDataParallel(net(), **options)
    train(model, 2)
    fit(model)
    before = values_of(model)
    backward(model, 5)
    return before + values_of(model)


def in_accumulation(fit: Fit, **options: Any) -> list[Tensor]:
    """Fitted between two backwards of one step, the first of which reduces nothing."""
    model = DistributedDataParallel(net(), **options)
    train(model, 2)
    model.zero_grad()
    with model.no_sync():
        backward(model, 3)
        fit(model)
    before = values_of(model)
    backward(model, 4)
    return before + values_of(model)


def with_comm_hook(fit: Fit, before: int) -> list[Tensor]:
    """Fitted after some steps under PowerSGD, which keeps errors and low-rank factors."""
    model = DistributedDataParallel(net())
    state = power.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, power.powerSGD_hook)
    train(model, before)
    iteration = state.iter
    fit(model)
    assert state.iter == iteration
    train(model, 4)
    return values_of(model)


# FSDP2


def sharded(*, by_block: bool = True, **options: Any) -> Any:
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    model = net()
    for block in model.blocks if by_block else ():
        fully_shard(block, **options)
    return fully_shard(model, **options)


def in_sharded_accumulation(
    fit: Fit, *, reshards: bool = True, reduces: bool = False, **options: Any
) -> list[Tensor]:
    """Fitted between backwards of which all but the last leave gradients unreduced."""
    model = sharded(**options)
    backward(model, 0)
    if reduces:
        model.set_requires_all_reduce(False)
    else:
        model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(reshards)
    model.set_is_last_backward(False)
    backward(model, 1)
    fit(model)
    backward(model, 2)
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)
    backward(model, 3)
    return values_of(model)


def with_all_reduce_hook(fit: Fit) -> list[Tensor]:
    """Fitted with a hook on reduced gradients that counts."""
    model, calls = sharded(), []

    def hook(gradient: Tensor) -> None:
        calls.append(1)
        gradient.mul_(len(calls))

    model.set_all_reduce_hook(hook)
    backward(model, 0)
    fit(model)
    backward(model, 1)
    return values_of(model)


def tensor_parallel() -> nn.Module:
    model = net()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def in_tensor_parallel_accumulation(fit: Fit) -> list[Tensor]:
    torch.manual_seed(0)
    same = torch.randn(64, DIM)
    model = tensor_parallel()
    loss(model(same)).backward()
    if fit is not no_fit:
        rekindle.fit(model, same, "80%", loss=loss)
    loss(model(same)).backward()
    return values_of(model)


CASES: dict[str, Callable[[Fit], list[Tensor]]] = {
    **{
        f"static graph, {how}": partial(inside_ddp, how=how, static_graph=True)
        for how in ("wrapper", "module", "function")
    },
    "static graph, replicate": partial(replicated, static_graph=True),
    "static graph between steps": partial(between_steps, static_graph=True),
    "bucket views": partial(between_steps, gradient_as_bucket_view=True),
    "accumulation in bucket views": partial(in_accumulation, gradient_as_bucket_view=True),
    "accumulation in a static graph": partial(in_accumulation, static_graph=True),
    "PowerSGD, first": partial(with_comm_hook, before=0),
    "PowerSGD, later": partial(with_comm_hook, before=3),
    "sharded accumulation": in_sharded_accumulation,
    "sharded accumulation, gathered": partial(in_sharded_accumulation, reshards=False),
    "sharded accumulation, one unit": partial(in_sharded_accumulation, by_block=False),
    "sharded accumulation, mixed precision": partial(
        in_sharded_accumulation,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ),
    "all-reduce hook": with_all_reduce_hook,
    "tensor-parallel accumulation": in_tensor_parallel_accumulation,
}


def hybrid_accumulation() -> Callable[[Fit], list[Tensor]]:
    """Replicated and sharded, reduced among shards and not among replicas."""
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    return partial(in_sharded_accumulation, reduces=True, mesh=mesh)


def is_same(case: Callable[[Fit], list[Tensor]]) -> bool:
    expected, found = case(no_fit), case(fit)
    return len(expected) == len(found) and all(map(torch.equal, expected, found))


# Bytes


def static(model: nn.Module, x: Tensor) -> dict[str, int]:
    """Bytes that count as static, with the state of an optimizer before its first step and after;
    and the bytes of this rank's parts of parameters, and of the batch."""
    optimizer = torch.optim.Adam(model.parameters())
    found = {
        "own": sum(local(p).nbytes for p in model.parameters()),
        "batch": x.nbytes,
        "bare": rekindle.profile(model, x, loss=loss).static_bytes,
        "first": rekindle.profile(model, x, loss=loss, optimizer=optimizer).static_bytes,
    }
    loss(model(x)).backward()
    optimizer.step()
    steps = sum(state["step"].nbytes for state in optimizer.state.values())
    later = rekindle.profile(model, x, loss=loss, optimizer=optimizer).static_bytes
    return {**found, "later": later - steps}


def peaks() -> dict[str, Any]:
    """The peak that `fit` measures of a sharded model without a plan, and that of a step.

    A collective's thread may hold the buffers of one unit for a moment longer, so the budget has
    room for one more.
    """
    model, x = sharded(), batch(0)
    backward(model, 0)
    backward(model, 0)  # from here on a step is like any other
    known = [*model.parameters(), *(p.grad for p in model.parameters()), x]
    always = bytes_of(known)
    with PolledBytes(known) as polled:
        out = model(x)
        loss(out).backward()
        del out
    unit = 2 * bytes_of(net().blocks[0].parameters())
    plan = rekindle.fit(model, x, always + polled.peak + unit, loss=loss)
    return {
        "step": always + polled.peak,
        "unit": unit,
        "measured": plan.measured_peak,
        "options": [type(option.strategy).__name__ for _, _, option in plan.blocks],
    }


def shares() -> dict[str, Any]:
    """A share as the budget, where one rank has a batch three times as large as the other's."""
    model = DistributedDataParallel(net())
    own, largest = torch.randn(64 * (1 + 2 * dist.get_rank()), DIM), torch.randn(64 * 3, DIM)
    plan = rekindle.fit(model, own, "60%", loss=loss)
    rekindle.remove(model)
    profile = rekindle.profile(model, largest, loss=loss)
    return {
        "budget": plan.budget,
        "measured": plan.measured_peak,
        "options": [option.describe() for _, _, option in plan.blocks],
        "of the largest": rekindle.solve(profile, "60%").budget,
    }


# The trainer of transformers


def trained(folder: Path, budget: str | None) -> list[Tensor]:
    """The weights of a tiny model after a `Trainer` with a static graph, planned or not."""
    import transformers  # noqa: PLC0415

    from rekindle.integrations.transformers import Callback  # noqa: PLC0415

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=16, n_embd=DIM, n_head=2, n_layer=2, n_positions=8, use_cache=False
        )
    )
    tokens = torch.randint(16, (16, 8))
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(folder),
            ddp_static_graph=True,
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[Callback(budget=budget)] if budget else [],
    )
    trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    return values_of(model)


def is_trained_the_same(folder: Path) -> bool:
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # asked for, and not used
    expected, found = trained(folder, None), trained(folder, "70%")
    return len(expected) == len(found) and all(map(torch.equal, expected, found))


def has_trainer() -> bool:
    return all(find_spec(name) is not None for name in ("transformers", "accelerate"))


def cases(folder: Path) -> Cases:
    compared = {**CASES, "hybrid accumulation": hybrid_accumulation()}
    return {
        **{name: partial(is_same, case) for name, case in compared.items()},
        "static, sharded": lambda: static(sharded(), batch(0)),
        "static, tensor parallel": lambda: static(tensor_parallel(), batch(0)),
        "peaks": peaks,
        "shares": shares,
        **({"trainer": partial(is_trained_the_same, folder)} if has_trainer() else {}),
    }


if __name__ == "__main__":
    if has_trainer():
        import rekindle.integrations.transformers
    sys.exit(run_worlds({WORLD: cases}))
