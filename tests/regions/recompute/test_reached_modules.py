"""Modules whose buffers are right, by the way in which a region reaches them."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.regions.recompute.buffered import (
    Counting,
    InPlace,
    Run,
    assert_trains_alike,
    plain,
)
from tests.toys import same_bits

# Ways to reach a module


GLOBAL = InPlace()


def _through_a_global(x: Tensor) -> Tensor:
    return GLOBAL(x)


class Holder:
    """Not a module, but holds one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x)

    def method(self, x: Tensor) -> Tensor:
        return self.model(x)


@dataclass
class Context:
    """An argument that holds a module."""

    parts: dict[str, nn.Module] = field(default_factory=dict)


class Method(InPlace):
    def other(self, x: Tensor) -> Tensor:
        return self.forward(x)

    @rekindle.checkpoint()
    def decorated(self, x: Tensor) -> Tensor:
        return self.forward(x)


def _call(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def _call_keyword(x: Tensor, model: nn.Module) -> Tensor:
    return model(x)


def _call_all(models: list[nn.Module], x: Tensor) -> Tensor:
    for model in models:
        x = model(x)
    return x


def _as_default(model: nn.Module) -> Run:
    def region(x: Tensor, model: nn.Module = model) -> Tensor:
        return model(x)

    return region


def _wrapped(function: Run) -> Run:
    @functools.wraps(function)
    def outer(*args: Any) -> Any:
        return function(*args)

    return outer


def _closure(model: nn.Module) -> Run:
    def region(x: Tensor) -> Tensor:
        return model(x)

    return region


def _closure_of_items(models: Any, key: Any) -> Run:
    def region(x: Tensor) -> Tensor:
        return models[key](x)

    return region


def _closure_of_holder(holder: Holder) -> Run:
    def region(x: Tensor) -> Tensor:
        return holder.model(x)

    return region


def _call_held(holder: Holder, x: Tensor) -> Tensor:
    return holder.model(x)


def _call_part(context: Context, x: Tensor) -> Tensor:
    return context.parts["m"](x)


REACHED = {
    "closure": lambda m, x, run: run(_closure(m), x),
    "partial": lambda m, x, run: run(functools.partial(_call, m), x),
    "partial by keyword": lambda m, x, run: run(functools.partial(_call_keyword, model=m), x),
    "bound method": lambda m, x, run: run(m.other, x),
    "bound forward": lambda m, x, run: run(m.forward, x),
    "bound __call__": lambda m, x, run: run(m.__call__, x),
    "list in closure": lambda m, x, run: run(_closure_of_items([m], 0), x),
    "dict in closure": lambda m, x, run: run(_closure_of_items({"m": m}, "m"), x),
    "module list in closure": lambda m, x, run: run(_closure_of_items(nn.ModuleList([m]), 0), x),
    "argument": lambda m, x, run: run(_call, m, x),
    "keyword argument": lambda m, x, run: run(_call_keyword, x, model=m),
    "list argument": lambda m, x, run: run(_call_all, [m], x),
    "default argument": lambda m, x, run: run(_as_default(m), x),
    "wrapped function": lambda m, x, run: run(_wrapped(_closure(m)), x),
    "twice wrapped function": lambda m, x, run: run(_wrapped(_wrapped(_closure(m))), x),
    "four times wrapped function": lambda m, x, run: run(
        _wrapped(_wrapped(_wrapped(_wrapped(_closure(m))))), x
    ),
    "callable object": lambda m, x, run: run(Holder(m), x),
    "method of a plain object": lambda m, x, run: run(Holder(m).method, x),
    "plain object in closure": lambda m, x, run: run(_closure_of_holder(Holder(m)), x),
    "plain object argument": lambda m, x, run: run(_call_held, Holder(m), x),
    "dataclass argument": lambda m, x, run: run(_call_part, Context({"m": m}), x),
}


@pytest.mark.parametrize("way", REACHED, ids=lambda way: way.replace(" ", "_"))
def test_buffers_are_right_for_a_module_reached_by(way: str) -> None:
    assert_trains_alike(Method(), REACHED[way], steps=2)


def test_buffers_are_right_for_a_module_reached_by_a_global() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    twin = copy.deepcopy(GLOBAL)
    twin(x).sum().backward()
    expected, x.grad = x.grad, None
    rekindle.checkpoint(_through_a_global, x).sum().backward()
    assert torch.equal(GLOBAL.scale, twin.scale)
    assert same_bits(x.grad, expected)


def test_buffers_are_right_for_a_decorated_method() -> None:
    def program(model: nn.Module, x: Tensor, run: Run) -> Tensor:
        return model(x) if run is plain else model.decorated(x)

    assert_trains_alike(Method(), program, steps=2)


def test_buffers_are_right_for_a_bound_method_of_a_child() -> None:
    model = nn.Sequential(nn.Linear(8, 8), InPlace())
    assert_trains_alike(
        model, lambda m, x, run: run(lambda x, f=m[1].forward: f(m[0](x)), x), steps=2
    )


def test_buffers_are_right_in_checkpoint_sequential() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        InPlace(),
        nn.BatchNorm1d(8),
        Counting(),
        nn.Linear(8, 8),
    )

    def program(model: nn.Module, x: Tensor, run: Run) -> Tensor:
        return model(x) if run is plain else rekindle.checkpoint_sequential(model, 3, x)

    assert_trains_alike(model, program, steps=3)


def test_buffers_are_right_in_checkpoint_sequential_of_functions() -> None:
    model = nn.Sequential(InPlace(), Counting(), InPlace(), Counting())

    def program(model: nn.Module, x: Tensor, run: Run) -> Tensor:
        functions = [model[0], _closure(model[1]), model[2].forward, model[3]]
        return model(x) if run is plain else rekindle.checkpoint_sequential(functions, 2, x)

    assert_trains_alike(model, program, steps=2)


def test_buffers_are_right_in_the_reentrant_variant() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), InPlace())
    assert_trains_alike(
        model, run=functools.partial(rekindle.checkpoint, use_reentrant=True), steps=2
    )


def test_buffers_are_right_without_early_stop() -> None:
    assert_trains_alike(
        InPlace(), run=functools.partial(rekindle.checkpoint, early_stop=False), steps=2
    )


NORM = nn.BatchNorm1d(8)


def in_a_comprehension(x: Tensor) -> Tensor:
    return torch.cat([NORM(each) for each in (x,)]).sin()


def in_a_nested_function(x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return NORM(x)  # type: ignore[no-any-return]

    return inner(x).sin()


@pytest.mark.parametrize("region", [in_a_comprehension, in_a_nested_function])
def test_a_global_module_that_only_an_inner_function_names_is_not_changed_by_the_replay(
    region: Callable[[Tensor], Tensor],
) -> None:
    NORM.reset_running_stats()
    rekindle.checkpoint(region, torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert int(NORM.num_batches_tracked) == 1  # type: ignore[arg-type]
