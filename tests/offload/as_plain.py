"""Helpers for tests that a step under offload is the plain step, bit for bit."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import rekindle
from tests.offloading import STEPS, spilling
from tests.toys import assert_same_step, same_bits


def padded(x: Tensor) -> Tensor:
    """Follows what is tested: what is saved last is not moved, and here that are these."""
    for _ in range(4):
        x = x.sin()
    return x


def assert_plain_gradients(
    run: Callable[[], Any],
    leaves: list[Tensor],
    steps: int = STEPS,
    backward: Callable[[Tensor], None] = Tensor.backward,
    **options: Any,
) -> None:
    """Every step under offload is the plain step, bit for bit, and something was moved."""

    def offloaded() -> Any:
        with spilling(**options):
            return run()

    with rekindle.observe() as seen:
        for seed in range(steps):
            assert_same_step(run, offloaded, leaves, seed=seed, backward=backward)
    assert seen.spill.tensors_out > 0


def plain_and_offloaded(**options: Any) -> Iterator[AbstractContextManager[Any]]:
    """A plain step, and then some under offload."""
    yield nullcontext()
    for _ in range(STEPS):
        yield spilling(**options)


def assert_as_plain(step: Callable[[AbstractContextManager[Any]], list[Tensor]]) -> None:
    """`step(context)` gives the same tensors plain and under offload, in each step."""
    contexts = plain_and_offloaded()
    torch.manual_seed(1)
    expected = step(next(contexts))
    for context in contexts:
        torch.manual_seed(1)
        found = step(context)
        assert [same_bits(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(
            expected
        )


def branching(x: Tensor, w: Tensor) -> Tensor:
    h = functional.silu(x @ w) * (x + 1)
    return padded(h.exp().softmax(-1) @ w.t()) * h.t().sin()
