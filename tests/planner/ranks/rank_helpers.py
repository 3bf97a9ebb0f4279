"""Models, batches and comparisons that the cases of ranks share."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import rekindle
from tests.ranks import local, local_gradients
from tests.toys import Stack

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


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    local(loss_of(model(x))).backward()
    return list(local_gradients(model).values())


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


def facts_of(plan: rekindle.Plan) -> Found:
    """The parts of a plan that have to be the same on all ranks."""
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
    found = {"plan": facts_of(plan), "same": same(gradients(model, x), expected)}
    rekindle.remove(model)
    return found


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


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """By FSDP2, each block as a unit."""
    for block in next(model.children()):
        fully_shard(block, **options)
    return fully_shard(model, **options)
