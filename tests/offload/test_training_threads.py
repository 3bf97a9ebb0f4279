"""Threads that train at once, and backwards on other threads, are plain under offload."""

import threading
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.offload.as_plain import assert_as_plain, assert_plain_gradients
from tests.offloading import leaf, spilling
from tests.toys import Stack, same_bits

pytestmark = pytest.mark.usefixtures("new_offloaders", "written_at_once")


def test_threads_that_train_at_once_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = Stack(depth=4, dim=32)
    inputs = [torch.randn(16, 32) for _ in range(4)]
    parameters = list(model.parameters())
    expected = [torch.autograd.grad(model(x).sum(), parameters) for x in inputs]
    wrong: list[int] = []

    def work(number: int) -> None:
        torch.set_num_threads(1)
        for _ in range(6):
            with spilling():
                loss = model(inputs[number]).sum()
            found = torch.autograd.grad(loss, parameters)
            wrong.extend(
                number for a, b in zip(found, expected[number], strict=True) if not same_bits(a, b)
            )

    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except RuntimeError as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, failures) == ([], [])


def test_backward_on_another_thread_is_plain() -> None:
    model, x = Stack(depth=4), leaf(4, 8)

    def elsewhere(loss: Tensor) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    assert_plain_gradients(lambda: model(x), [x, *model.parameters()], backward=elsewhere)


class Deeper(torch.autograd.Function):
    """Runs a backward inside backward, `depth` deep: autograd changes threads on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.depth = depth
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            h = x.exp().sin()
            h = Deeper.apply(h, ctx.depth - 1) if ctx.depth else h
            (found,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return grad * found.detach(), None


def test_a_backward_on_a_thread_of_autograd_with_a_graph_of_its_own_is_plain() -> None:
    """Such a thread has no frame of Python below the hooks."""
    x = leaf(16)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            loss = Deeper.apply(x * 2, 80).sum()
            return list(torch.autograd.grad(loss, x))

    assert_as_plain(step)
