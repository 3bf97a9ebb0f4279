"""Planning leaves nothing behind: no tensors, no hooks, no memory, also where it fails."""

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.planner.instruments.memory_meter import LiveBytes
from tests.planner.language_models import Case, every_model, gpt2

pytest.importorskip("scipy")


def fit_and_remove(model: nn.Module, batch: Any) -> None:
    rekindle.fit(model, batch, "80%")
    rekindle.remove(model)


def make_a_frontier(model: nn.Module, batch: Any) -> None:
    rekindle.frontier(rekindle.profile(model, batch), points=2)


every_call = pytest.mark.parametrize("call", [rekindle.profile, fit_and_remove, make_a_frontier])


def hooks_of(model: nn.Module) -> list[Any]:
    """The hooks and the attributes of every module, and the hooks and gradients of parameters."""
    modules = [
        (set(vars(module)), [list(found) for n, found in vars(module).items() if "_hooks" in n])
        for module in model.modules()
    ]
    parameters = [
        (p.grad, p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None) or None)
        for p in model.parameters()
    ]
    return [modules, parameters]


class Left:
    """Differences in bytes, hooks, files, threads and settings that a call leaves."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self._model = model
        gc.collect()  # of what other tests left
        self._before = self._state()
        self.live = LiveBytes([*model.parameters(), *model.buffers(), *batch.values()])

    def _state(self) -> tuple[Any, ...]:
        return (
            hooks_of(self._model),
            sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None,
            threading.active_count(),
            torch.is_grad_enabled(),
            rekindle.is_recomputing(),
            torch.get_rng_state().tolist(),
            [b.tolist() for b in self._model.buffers()],
        )

    def check(self) -> None:
        gc.collect()
        assert self.live.now() == 0
        assert self._state() == self._before


@every_model
@every_call
def test_nothing_is_left_behind(case: Callable[[], Case], call: Callable[..., Any]) -> None:
    model, batch = case()
    model(**batch).loss.backward()  # what is made once, is
    model.zero_grad()
    left = Left(model, batch)
    with left.live:
        call(model, batch)
    left.check()


class Failing(nn.Module):
    """Around a module: raises at the n-th forward, or in the n-th backward."""

    def __init__(self, inner: nn.Module, error: type[BaseException], way: str, at: int) -> None:
        super().__init__()
        self.inner = inner
        self._error = error
        self._left = [at]
        self._way = way

    def fail_in_time(self) -> None:
        self._left[0] -= 1
        if self._left[0] == 0:
            raise self._error("as planned")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        if self._way == "forward":
            self.fail_in_time()
        elif torch.is_grad_enabled():
            out = FailsInBackward.apply(out, self.fail_in_time)
        return out


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fail_in_time: Callable[[], None]) -> Tensor:
        ctx.fail_in_time = fail_in_time
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.fail_in_time()
        return *gradients, None


@pytest.mark.parametrize("at", [1, 2, 9, 40])
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_behind_where_it_fails(
    error: type[BaseException], way: str, at: int
) -> None:
    model, batch = gpt2()
    mlp = model.transformer.h[0].mlp  # type: ignore[union-attr, index]
    mlp.act = Failing(mlp.act, error, way, at)  # type: ignore[union-attr, arg-type]
    left = Left(model, batch)
    with left.live:
        assert failed_with(error, lambda: rekindle.fit(model, batch, "80%"))
    left.check()


def failed_with(error: type[BaseException], call: Callable[[], Any]) -> bool:
    """Returns whether a call raises an error; none of its frames is left."""
    try:
        call()
    except error:
        return True
    return False


@pytest.mark.gpu
@every_model
def test_nothing_is_left_behind_on_a_gpu(case: Callable[[str], Case]) -> None:
    model, batch = case("cuda")
    model(**batch).loss.backward()  # what is made once, is: workspaces, above all
    model.zero_grad()
    fit_and_remove(model, batch)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for call in (rekindle.profile, fit_and_remove, make_a_frontier):
        call(model, batch)
        gc.collect()
        assert torch.cuda.memory_allocated() == before
