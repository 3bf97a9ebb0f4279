"""The generator that torch's composable form drives."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

import rekindle
from rekindle.compat import checkpoint as compat
from rekindle.compat.checkpoint import (
    _checkpoint_without_reentrant_generator,
)
from tests.toys import leaf, same_bits, wave


def assert_no_hooks_are_left() -> None:
    """Torch refuses to disable saved-tensor hooks where some are in place."""
    with disable_saved_tensors_hooks("none should be here"):
        pass


def test_the_generator_makes_a_region_of_what_runs_between_its_two_steps() -> None:
    x = leaf(3)
    with rekindle.observe() as seen:
        region = _checkpoint_without_reentrant_generator(
            wave, True, compat.noop_context_fn, "default", False, True, x
        )
        next(region)
        out = wave(x)
        with pytest.raises(StopIteration):
            next(region)
        (grad,) = torch.autograd.grad(out.sum(), [x])
    assert (seen.total.forwards, seen.total.replays) == (1, 1)
    assert same_bits(grad, torch.autograd.grad(wave(x).sum(), [x])[0])


def test_what_runs_after_the_generators_second_step_is_outside_the_region() -> None:
    x, calls = leaf(3), []

    def noted(x: Tensor) -> Tensor:
        calls.append("run")
        return x.sin()

    region = _checkpoint_without_reentrant_generator(noted, True, compat.noop_context_fn)
    next(region)
    next(region, None)
    noted(x).sum().backward()
    assert calls == ["run"]


def test_the_generator_takes_keyword_arguments_of_the_region() -> None:
    x = leaf(3)

    def scaled(x: Tensor, by: float) -> Tensor:
        return (x * by).exp().sin()

    region = _checkpoint_without_reentrant_generator(
        scaled, True, compat.noop_context_fn, "default", False, True, x, by=3.0
    )
    next(region)
    out = scaled(x, by=3.0)
    next(region, None)
    (grad,) = torch.autograd.grad(out.sum(), [x])
    assert same_bits(grad, torch.autograd.grad(scaled(x, 3.0).sum(), [x])[0])


def test_the_generator_under_no_grad_makes_no_region() -> None:
    with torch.no_grad(), rekindle.observe() as seen:
        region = _checkpoint_without_reentrant_generator(wave)
        next(region)
        assert_no_hooks_are_left()
        with pytest.raises(StopIteration):
            next(region)
    assert seen.total.forwards == 0


def test_an_error_thrown_into_the_generator_comes_out_and_ends_the_region() -> None:
    region = _checkpoint_without_reentrant_generator(wave)
    next(region)
    with pytest.raises(ZeroDivisionError):
        region.throw(ZeroDivisionError("in the region"))
    assert_no_hooks_are_left()


def test_a_generator_that_is_closed_ends_the_region() -> None:
    region = _checkpoint_without_reentrant_generator(wave)
    next(region)
    region.close()
    assert_no_hooks_are_left()


def test_the_generator_runs_the_forward_context_around_the_region() -> None:
    events: list[str] = []

    @contextmanager
    def noted(name: str) -> Any:
        events.append(f"enter {name}")
        yield
        events.append(f"leave {name}")

    x = leaf(3)
    region = _checkpoint_without_reentrant_generator(
        wave, True, lambda: (noted("forward"), noted("replay")), "none", False, False, x
    )
    next(region)
    out = wave(x)
    next(region, None)
    assert events == ["enter forward", "leave forward"]
    out.sum().backward()
    assert events[2:] == ["enter replay", "leave replay"]


def test_the_generator_refuses_a_wrong_option_at_its_first_step() -> None:
    region = _checkpoint_without_reentrant_generator(wave, determinism_check="bogus")
    with pytest.raises(ValueError, match="determinism_check"):
        next(region)
