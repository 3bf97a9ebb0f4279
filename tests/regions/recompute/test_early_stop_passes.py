"""The early stop passes the region's own handlers, and is never taken for an error."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import Tensor

import rekindle
from tests.regions.recompute.left_behind import Boom
from tests.toys import assert_same_step

# User code that catches, while a replay stops early


def test_except_exception_does_not_catch_the_early_stop(x: Tensor) -> None:
    caught = []

    def region(x: Tensor) -> Tensor:
        try:
            return x.exp().sin()
        except Exception as error:  # noqa: BLE001
            caught.append(error)
            return x

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])
    assert caught == []


def test_a_region_that_catches_base_exceptions_has_the_plain_gradient(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        try:
            y = x.exp().sin()
        except BaseException:  # noqa: BLE001
            y = x
        return y + 1

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_a_region_that_catches_base_exceptions_and_goes_on_has_the_plain_gradient(
    x: Tensor,
) -> None:
    def region(x: Tensor) -> Tensor:
        y = x
        with suppress(BaseException):
            y = x.exp().sin()
        (y * y).cos()  # saves for a backward that nobody runs
        return y + 1

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_a_region_that_catches_base_exceptions_and_then_fails_has_the_plain_gradient(
    x: Tensor,
) -> None:
    """The replay has all it needs; what the region makes of a swallowed stop is its own affair."""

    def region(x: Tensor) -> Tensor:
        with suppress(BaseException):
            y = x.exp().sin()
        return y + 1

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_an_error_is_still_an_error_when_the_region_caught_one_before(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        with suppress(BaseException):
            x.exp()
            raise Boom
        y = x.exp()
        if rekindle.is_recomputing():
            raise Boom
        return y.sin()

    y = rekindle.checkpoint(region, x).sum()
    with pytest.raises(Boom):
        y.backward()


def test_ops_in_a_finally_block_do_not_disturb_the_early_stop(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        try:
            return x.exp().sin()
        finally:
            (x * x).cos()

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_ops_in_the_exit_of_a_context_do_not_disturb_the_early_stop(x: Tensor) -> None:
    class Logging:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            (x * x).cos().sum()

    def region(x: Tensor) -> Tensor:
        with Logging():
            return x.exp().sin()

    y = rekindle.checkpoint(region, x)
    y.sum().backward()
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    assert torch.equal(x.grad, expected)


def test_a_generator_inside_a_region_lets_the_early_stop_through(x: Tensor) -> None:
    def layers(x: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            x = x.exp().sin()
            yield x

    def region(x: Tensor) -> Tensor:
        return list(layers(x))[-1]

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_a_context_made_by_a_generator_lets_the_early_stop_through(x: Tensor) -> None:
    @contextmanager
    def scope() -> Iterator[None]:
        yield

    def region(x: Tensor) -> Tensor:
        with scope(), scope():
            return x.exp().sin()

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_a_stop_iteration_of_the_users_is_not_taken_for_ours(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        y = x.exp()
        if rekindle.is_recomputing():
            raise StopIteration("the user's")
        return y.sin()

    y = rekindle.checkpoint(region, x).sum()
    with pytest.raises(StopIteration, match="the user's"):
        y.backward()
