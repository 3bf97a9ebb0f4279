"""Modules with strategies take and return whatever they do without."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.modules.applying import Shaped, assert_as_before, every_kind, seen_of
from tests.toys import Stack, leaf


@every_kind
def test_a_dict_as_input_has_the_plain_gradients(what: Any) -> None:
    model, x, y = Shaped(lambda mlp, batch: mlp(batch["x"]) * batch["more"][0]), leaf(), leaf()
    assert_as_before(model, {"": what}, lambda: model({"x": x, "more": [y]}), x, y)


@every_kind
def test_keyword_only_inputs_have_the_plain_gradients(what: Any) -> None:
    model, x, y = Shaped(lambda mlp, *, x, y: mlp(x) * y), leaf(), leaf()
    assert_as_before(model, {"": what}, lambda: model(x=x, y=y), x, y)


@every_kind
def test_no_inputs_at_all_have_the_plain_gradients(what: Any) -> None:
    x = torch.randn(2, 8)
    model = Shaped(lambda mlp: mlp(x))
    assert_as_before(model, {"": what}, model)


NAMES = [
    *("function", "use_reentrant", "context_fn", "determinism_check", "debug", "early_stop"),
    *("preserve_rng_state", "args", "kwargs", "module", "way", "forward", "name"),
]


@every_kind
@pytest.mark.parametrize("name", NAMES)
def test_a_modules_own_keyword_may_have_any_name(name: str, what: Any) -> None:
    model, x, y = Shaped(lambda mlp, x, **given: mlp(x) * given[name]), leaf(), leaf()
    assert_as_before(model, {"": what}, lambda: model(x, **{name: y}), x, y)


@pytest.mark.parametrize("given", [True, False, None, "values", 3], ids=str)
def test_a_value_for_a_modules_own_debug_reaches_it(given: Any) -> None:
    model = Shaped(lambda mlp, x, debug: (mlp(x), debug))
    rekindle.apply(model, {"": "recompute"})
    assert model(leaf(), debug=given)[1] is given


def test_an_input_is_held_whatever_the_name_of_its_keyword_is() -> None:
    found = []
    for name in ("debug", "other"):
        model = Shaped(lambda mlp, x, **given: mlp(x) * next(iter(given.values())))
        rekindle.apply(model, {"": "recompute"})
        given = {name: leaf() * 1}
        found.append(seen_of(lambda m=model, y=given: m(leaf(), **y).sum().backward()).total)  # type: ignore[misc]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["other", "debug"])
def test_a_keyword_whose_container_is_changed_after_forward_is_replayed_as_it_was(
    name: str,
) -> None:
    model, x, y = Shaped(lambda mlp, x, **given: mlp(x).exp() * given[name]["by"]), leaf(), leaf()

    def run() -> Tensor:
        batch = {"by": y}
        out: Tensor = model(x, **{name: batch})
        batch.clear()
        return out

    assert_as_before(model, {"": "recompute"}, run, x, y)


@pytest.mark.parametrize("name", ["other", "debug"])
def test_a_keyword_that_is_changed_in_place_after_forward_is_told(name: str) -> None:
    model, x, y = Shaped(lambda mlp, x, **given: mlp(x).exp() * given[name].sin()), leaf(), leaf()
    rekindle.apply(model, {"": "recompute"})
    loss = model(x, **{name: y}).sum()
    with torch.no_grad():
        y.zero_()
    with pytest.raises(rekindle.CheckpointError, match="changed in place"):
        loss.backward()


@dataclass
class Output:
    hidden: Tensor
    parts: tuple[Tensor, ...]


class Pair(NamedTuple):
    hidden: Tensor
    gate: Tensor


OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda mlp, x: (mlp(x), x.sin()), lambda out: out[0] * out[1]),
    "dict": (lambda mlp, x: {"a": [mlp(x)], "b": x.exp()}, lambda out: out["a"][0] * out["b"]),
    "named": (lambda mlp, x: Pair(mlp(x), x.sin()), lambda out: out.hidden * out.gate),
    "dataclass": (
        lambda mlp, x: Output(mlp(x), (x.sin(), x.cos())),
        lambda out: out.hidden * out.parts[0] * out.parts[1],
    ),
    "with others": (lambda mlp, x: (mlp(x), None, 3, "x"), lambda out: out[0] * out[2]),
    "its input": (lambda mlp, x: (x, mlp(x)), lambda out: out[0] * out[1]),
    "views": (lambda mlp, x: mlp(x).chunk(2), lambda out: out[0] * out[1]),
}


@every_kind
@pytest.mark.parametrize(("function", "of"), OUTPUTS.values(), ids=OUTPUTS)
def test_an_output_of_any_shape_has_the_plain_gradients(
    function: Callable[..., Any], of: Callable[[Any], Tensor], what: Any
) -> None:
    model, x = Shaped(function), leaf()
    assert_as_before(model, {"": what}, lambda: of(model(x)), x)


@every_kind
@pytest.mark.parametrize("name", ["tuple", "dict", "named", "dataclass"])
def test_an_output_keeps_its_type(name: str, what: Any) -> None:
    model, x = Shaped(OUTPUTS[name][0]), leaf()
    plain = type(model(x))
    rekindle.apply(model, {"": what})
    assert type(model(x)) is plain


def test_an_error_in_a_forward_is_the_users_own() -> None:
    def fails(mlp: nn.Module, x: Tensor) -> Tensor:
        raise KeyError("mine")

    model = Shaped(fails)
    rekindle.apply(model, {"": "recompute"})
    with pytest.raises(KeyError, match="mine"):
        model(leaf())


def test_a_wrong_argument_is_told_as_by_the_plain_model() -> None:
    model = Stack(2)
    rekindle.apply(model, {"": "recompute"})
    with pytest.raises(TypeError, match=r"forward\(\) got an unexpected keyword argument 'nope'"):
        model(leaf(), nope=1)
