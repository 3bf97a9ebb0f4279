"""Exceptions, mismatches and early stops keep no memory."""

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.regions.recompute.recompute_region import RecomputeRegion
from rekindle.regions.recompute.slots import Slot
from tests.regions.recompute.living import Storages, count, five, leaf


@pytest.fixture(autouse=True)
def no_garbage_collector() -> Iterator[None]:
    """And what lived before a test is no concern of it."""
    gc.collect()
    gc.disable()
    gc.freeze()
    yield
    gc.enable()


# After exceptions


def raised(call: Callable[[], Any]) -> str:
    """The name of the error that a call ends in; the error itself dies here."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__
    return "none"


def test_an_exception_in_forward_leaves_nothing() -> None:
    x = leaf(8)

    def region(x: Tensor) -> Tensor:
        five(x)
        raise ValueError("forward")

    with Storages() as storages:
        assert raised(lambda: rekindle.checkpoint(region, x * 2)) == "ValueError"
        assert storages.alive() == []
    assert (count(RecomputeRegion), count(Slot)) == (0, 0)


def test_an_exception_in_replay_leaves_nothing_but_the_graph() -> None:
    x = leaf(8)

    def region(x: Tensor) -> Tensor:
        x = five(x)
        if rekindle.is_recomputing():
            raise ValueError("replay")
        return five(x)

    with Storages() as storages:
        loss = rekindle.checkpoint(region, x * 2).sum()
        assert raised(loss.backward) == "ValueError"
        assert storages.alive() == [4, 32]
        del loss
        assert storages.alive() == []
    assert (count(RecomputeRegion), count(Slot)) == (0, 0)


@pytest.mark.parametrize("determinism_check", ["default", "values"])
def test_a_replay_that_does_not_match_leaves_nothing_when_its_outputs_die(
    determinism_check: Any,
) -> None:
    x = leaf(8)

    def region(x: Tensor) -> Tensor:
        return five(x[:4] if rekindle.is_recomputing() else x)

    with Storages() as storages:
        loss = rekindle.checkpoint(region, x * 2, determinism_check=determinism_check).sum()
        assert raised(loss.backward) == "CheckpointError"
        del loss
        assert storages.alive() == []
    assert (count(RecomputeRegion), count(Slot)) == (0, 0)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_modified_activation_leaves_nothing_but_the_graph(retain_graph: bool) -> None:
    """Its error is raised from where the activation was to be; the two must not hold each other."""
    x = leaf(8)

    def region(x: Tensor) -> Tensor:
        hidden = x.exp()
        out = hidden.sin()
        hidden.add_(1)
        return out.cos().sin()

    loss = rekindle.checkpoint(region, x * 2).sum()
    assert raised(partial(loss.backward, retain_graph=retain_graph)) == "CheckpointError"
    del loss
    assert (count(RecomputeRegion), count(Slot)) == (0, 0)


def test_a_changed_argument_leaves_nothing_but_the_graph() -> None:
    x = leaf(8)
    hidden = x * 2
    loss = rekindle.checkpoint(five, hidden).sum()
    with torch.no_grad():
        hidden.add_(1)
    assert raised(loss.backward) == "CheckpointError"
    del loss, hidden
    assert (count(RecomputeRegion), count(Slot)) == (0, 0)


def test_an_exception_elsewhere_in_a_backward_for_chosen_inputs_leaves_nothing_replayed() -> None:
    x, y = leaf(8), leaf(8)

    def fail(grad: Tensor) -> None:
        raise ValueError("hook")

    with Storages() as storages:
        hidden = x * 2
        hidden.register_hook(fail)
        loss = rekindle.checkpoint(lambda x, y: five(x) * five(y), hidden, y * 2).sum()
        del hidden
        assert raised(partial(loss.backward, inputs=[x], retain_graph=True)) == "ValueError"
        assert storages.alive() == [4, 32, 32]  # the loss, and the two inputs


def test_early_stop_leaves_no_traceback_behind() -> None:
    x, locals_of_region = leaf(8), []

    class Local:
        pass

    def region(x: Tensor) -> Tensor:
        local = Local()
        locals_of_region.append(weakref.ref(local))
        return five(x)

    loss = rekindle.checkpoint(region, x).sum()
    loss.backward(retain_graph=True)
    assert [local() for local in locals_of_region] == [None, None]


def test_the_function_and_what_it_holds_die_with_the_outputs() -> None:
    class Owner:
        def __call__(self, x: Tensor) -> Tensor:
            return five(x)

    owner = Owner()
    alive = weakref.ref(owner)
    out = rekindle.checkpoint(owner, leaf(8))
    del owner
    assert alive() is not None
    del out
    assert alive() is None


def test_a_module_run_in_a_region_dies_with_its_last_user() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    alive = weakref.ref(model[1])
    rekindle.checkpoint(model, leaf(3, 4)).sum().backward()
    del model
    assert alive() is None
