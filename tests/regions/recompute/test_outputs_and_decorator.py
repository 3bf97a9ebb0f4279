"""Outputs of any kind, and `checkpoint` as a decorator."""

import dataclasses
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

import rekindle
from tests.regions.recompute.calls import assert_same_as_plain, leaf
from tests.toys import Mlp, assert_same_step


@dataclasses.dataclass
class Result:
    """An output that is a dataclass; a pytree, so that `toys.total` sees its tensors."""

    logits: Tensor
    name: str


register_dataclass(Result)


# What comes out


def test_a_tuple_output_works() -> None:
    x = leaf(3)
    assert_same_as_plain(lambda x: (x.sin().sin(), x.cos().cos(), 3), [x], x)


def test_a_nested_dict_output_works() -> None:
    x = leaf(3)
    assert_same_as_plain(lambda x: {"a": x.sin().sin(), "b": [x.cos().cos(), None]}, [x], x)


def test_a_dataclass_output_works() -> None:
    x = leaf(3)
    assert_same_as_plain(lambda x: Result(x.sin().sin(), "logits"), [x], x)


def test_an_output_that_is_an_input_works() -> None:
    x = leaf(3)
    assert_same_as_plain(lambda x: (x, x.sin().sin()), [x], x)


def test_an_output_without_gradient_works() -> None:
    x = leaf(3)
    assert_same_as_plain(lambda x: (x.sin().sin(), x.argmax(), x.detach().exp()), [x], x)


def test_a_region_that_returns_nothing_returns_none() -> None:
    assert rekindle.checkpoint(lambda x: None, leaf(3)) is None


# The decorator form


def test_the_decorator_form_runs_the_function_as_a_region() -> None:
    x = leaf(3)

    @rekindle.checkpoint(use_reentrant=False)
    def region(x: Tensor, scale: float) -> Tensor:
        return (x * scale).sin().sin()

    with rekindle.observe() as seen:
        assert_same_step(lambda: (x * 2.0).sin().sin(), lambda: region(x, scale=2.0), [x])
    assert (seen.total.forwards, seen.total.replays) == (1, 1)


def test_the_decorator_form_keeps_the_functions_name() -> None:
    @rekindle.checkpoint()
    def region(x: Tensor) -> Tensor:
        """Says what it is."""
        return x

    assert (region.__name__, region.__doc__) == ("region", "Says what it is.")


def test_the_decorator_form_passes_its_options_on() -> None:
    entered = []

    def contexts() -> Any:
        entered.append("asked")
        return nullcontext(), nullcontext()

    @rekindle.checkpoint(context_fn=contexts)
    def region(x: Tensor) -> Tensor:
        return x.sin()

    region(leaf(3))
    region(leaf(3))
    assert entered == ["asked", "asked"]


def test_the_decorator_form_works_on_methods() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        @rekindle.checkpoint()
        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x)

    model, x = Model(), leaf(2, 8)
    assert_same_step(lambda: model.mlp(x), lambda: model(x), [x, *model.parameters()])
