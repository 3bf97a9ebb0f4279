"""A fitted model, and its gradients with and without the plan."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import rekindle
from tests.toys import Stack, same_bits

SMALL, LARGE = 128, 512


def fitted(budget: int | str = "60%", drop: float = 0.1, rows: int = SMALL) -> Stack:
    torch.manual_seed(0)
    model = Stack(4, 16, drop)
    rekindle.fit(model, inputs(rows), budget)
    return model


def inputs(rows: int) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))


def grads(model: nn.Module, *rows: int) -> list[Tensor | None]:
    """Of one step on several micro-batches, from a fixed seed."""
    model.zero_grad()
    torch.manual_seed(1)
    for count in rows:
        model(inputs(count)).square().mean().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def plain(model: nn.Module, *rows: int) -> list[Tensor | None]:
    twin = copy.deepcopy(model)
    rekindle.remove(twin)
    return grads(twin, *rows)


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def plan_of(model: nn.Module) -> rekindle.Plan:
    plan = rekindle.plan_of(model)
    assert plan is not None
    return plan


Lines = Callable[[], list[str]]
