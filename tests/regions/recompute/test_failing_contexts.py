"""Contexts of `context_fn` that fail, and regions that fail in them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from tests.regions.recompute.left_behind import Boom, ambient_state, fails_in_replay

# Contexts of context_fn


@contextmanager
def _fails_to_enter() -> Iterator[None]:
    raise Boom
    yield


@contextmanager
def _fails_to_leave() -> Iterator[None]:
    yield
    raise Boom


def _noted(log: list[str], name: str) -> AbstractContextManager[None]:
    @contextmanager
    def context() -> Iterator[None]:
        log.append(f"enter {name}")
        try:
            yield
        finally:
            log.append(f"leave {name}")

    return context()


def test_a_context_fn_that_fails_leaves_nothing_behind(x: Tensor) -> None:
    def context_fn() -> Any:
        raise Boom

    before = ambient_state()
    with pytest.raises(Boom):
        rekindle.checkpoint(torch.exp, x, context_fn=context_fn)
    assert ambient_state() == before


@pytest.mark.parametrize("failing", [_fails_to_enter, _fails_to_leave])
def test_a_forward_context_that_fails_leaves_nothing_behind(x: Tensor, failing: Any) -> None:
    before = ambient_state()
    with pytest.raises(Boom):
        rekindle.checkpoint(torch.exp, x, context_fn=lambda: (failing(), nullcontext()))
    assert ambient_state() == before


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("failing", [_fails_to_enter, _fails_to_leave])
def test_a_replay_context_that_fails_leaves_nothing_behind(
    x: Tensor, failing: Any, early_stop: bool
) -> None:
    y = rekindle.checkpoint(
        lambda x: x.exp().sin(),
        x,
        context_fn=lambda: (nullcontext(), failing()),
        early_stop=early_stop and failing is _fails_to_enter,
    ).sum()
    before = ambient_state()
    with pytest.raises(Boom):
        y.backward()
    assert ambient_state() == before


def test_both_contexts_are_left_when_the_region_fails(x: Tensor) -> None:
    log: list[str] = []
    y = rekindle.checkpoint(
        fails_in_replay, x, context_fn=lambda: (_noted(log, "forward"), _noted(log, "replay"))
    ).sum()
    with pytest.raises(Boom):
        y.backward()
    assert log == ["enter forward", "leave forward", "enter replay", "leave replay"]


def test_the_forward_context_is_left_when_the_forward_fails(x: Tensor) -> None:
    log: list[str] = []

    def region(x: Tensor) -> Tensor:
        raise Boom

    with pytest.raises(Boom):
        rekindle.checkpoint(
            region, x, context_fn=lambda: (_noted(log, "forward"), _noted(log, "replay"))
        )
    assert log == ["enter forward", "leave forward"]


def test_the_replay_context_is_left_when_the_replay_stops_early(x: Tensor) -> None:
    log: list[str] = []
    rekindle.checkpoint(
        lambda x: x.exp().sin().sum(),
        x,
        context_fn=lambda: (_noted(log, "forward"), _noted(log, "replay")),
    ).backward()
    assert log == ["enter forward", "leave forward", "enter replay", "leave replay"]
