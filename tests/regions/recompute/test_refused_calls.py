"""Calls that are refused, with the error that says why."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from tests.regions.recompute.calls import leaf
from tests.toys import assert_same_step

# What is refused


@pytest.mark.parametrize("place", [lambda i: (i,), lambda i: ([i],), lambda i: ({"a": (i,)},)])
def test_an_iterator_as_argument_is_a_type_error(place: Callable[[Any], tuple[Any, ...]]) -> None:
    with pytest.raises(TypeError, match=r"iterator.*Pass a list or a tuple"):
        rekindle.checkpoint(next, *place(iter([leaf(3)])))


def test_a_generator_object_as_keyword_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"iterator \(generator\)"):
        rekindle.checkpoint(list, xs=(x for x in [leaf(3)]))


def test_a_generator_function_is_a_type_error() -> None:
    def region(x: Tensor) -> Iterator[Tensor]:
        yield x.sin()

    with pytest.raises(TypeError, match="returns a generator: it has not run yet"):
        rekindle.checkpoint(region, leaf(3))


def test_a_coroutine_function_is_a_type_error() -> None:
    coroutines = []

    async def work(x: Tensor) -> Tensor:
        return x.sin()

    def region(x: Tensor) -> Any:
        coroutines.append(work(x))
        return coroutines[-1]

    with pytest.raises(TypeError, match="returns a coroutine: it has not run yet"):
        rekindle.checkpoint(region, leaf(3))
    coroutines[0].close()


def test_an_unknown_determinism_check_is_a_value_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"\['default', 'none', 'values'\], but got 'typo'"):
        rekindle.checkpoint(torch.sin, leaf(3), determinism_check="typo")  # type: ignore[arg-type]


def test_a_context_fn_that_is_not_callable_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"context_fn should be a function .* but got tuple"):
        rekindle.checkpoint(torch.sin, leaf(3), context_fn=(1, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [5, "sin", torch.ones(1)])
def test_a_function_that_is_not_callable_is_a_type_error_that_says_so(function: Any) -> None:
    with pytest.raises(TypeError, match=rf"checkpoint\(\).* {type(function).__name__}"):
        rekindle.checkpoint(function, leaf(3))


def test_decorating_what_is_not_callable_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="decorates a function, not int"):
        rekindle.checkpoint(use_reentrant=False)(5)


def test_arguments_without_a_function_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="arguments but no function"):
        rekindle.checkpoint(None, leaf(3))


def test_the_reentrant_variant_refuses_keyword_arguments() -> None:
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        rekindle.checkpoint(torch.sin, leaf(3), use_reentrant=True, scale=2)


@pytest.mark.parametrize(
    "option", [{"debug": True}, {"context_fn": lambda: (nullcontext(), nullcontext())}]
)
def test_the_reentrant_variant_refuses_context_fn_and_debug(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="only supported when use_reentrant=False"):
        rekindle.checkpoint(torch.sin, leaf(3), use_reentrant=True, **option)


def test_a_refused_call_leaves_no_region_open() -> None:
    x = leaf(3)
    with pytest.raises(TypeError):
        rekindle.checkpoint(lambda x: x, iter([]))
    with rekindle.observe() as seen:
        x.sin().sin().sum().backward()
    assert (seen.total.forwards, seen.total.activations_dropped) == (0, 0)


def test_a_decorated_function_may_have_a_parameter_named_like_an_option() -> None:
    x = leaf(3)

    def scaled(x: Tensor, debug: float) -> Tensor:
        return (x * debug).sin()

    assert_same_step(
        lambda: scaled(x, debug=2.0), lambda: rekindle.checkpoint()(scaled)(x, debug=2.0), [x]
    )


def test_a_context_fn_that_returns_no_two_contexts_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="two context managers, but returned int"):
        rekindle.checkpoint(torch.sin, leaf(3), context_fn=lambda: 3)
