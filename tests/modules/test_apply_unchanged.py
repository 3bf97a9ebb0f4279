"""`apply` changes no module, name, key, class or signature."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import rekindle
from tests.modules.applying import (
    SPILL,
    applied,
    assert_as_plain,
    every_kind_and_nested,
    replays_in,
)
from tests.toys import Block, Mlp, Stack, assert_same_step, leaf


@every_kind_and_nested
def test_names_of_modules_parameters_and_keys_are_unchanged(what: Any) -> None:
    model, plain = applied(what), Stack(2)
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())


@every_kind_and_nested
def test_every_module_is_the_same_object_of_the_same_class(what: Any) -> None:
    model = Stack(2)
    before = [(module, type(module)) for module in model.modules()]
    rekindle.apply(model, what)
    after = [(module, type(module)) for module in model.modules()]
    assert all(a is b and c is d for (a, c), (b, d) in zip(before, after, strict=True))
    assert isinstance(model.blocks[0], Block)


@every_kind_and_nested
def test_a_model_prints_as_before(what: Any) -> None:
    assert repr(applied(what)) == repr(Stack(2))


@every_kind_and_nested
def test_attributes_are_reached_and_set_as_before(what: Any) -> None:
    model = applied(what)
    block: Any = model.blocks[0]
    block.note = "mine"
    assert (block.note, block.mlp.drop, block.mlp.up.out_features) == ("mine", 0.0, 16)
    del block.note
    assert not hasattr(block, "note")


@every_kind_and_nested
def test_apply_adds_no_buffer_hook_or_module(what: Any) -> None:
    model, plain = applied(what), Stack(2)
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        assert set(vars(one)) - set(vars(other)) <= {"forward"}
        hooks = [name for name in vars(other) if "hook" in name]
        assert [vars(one)[name] for name in hooks] == [vars(other)[name] for name in hooks]


def test_a_state_dict_of_a_plain_model_is_loaded() -> None:
    model, plain = applied(), Stack(2)
    assert str(model.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert_as_plain(model, leaf())


def test_a_plain_model_loads_the_state_dict() -> None:
    assert not Stack(2).load_state_dict(applied().state_dict()).missing_keys


# The forward that stands there


class Told(nn.Module):
    """Has parts, and a forward with much to read."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, *, scale: float = 1.0, **rest: Any) -> Tensor:
        """Scales what the Mlp makes."""
        return self.mlp(x) * scale  # type: ignore[no-any-return]


@pytest.fixture
def told() -> Told:
    model = Told()
    rekindle.apply(model, "recompute")
    return model


def test_the_signature_of_forward_is_unchanged(told: Told) -> None:
    assert inspect.signature(told.forward) == inspect.signature(Told().forward)


@pytest.mark.parametrize(
    "name", ["__doc__", "__name__", "__qualname__", "__module__", "__code__", "__annotations__"]
)
def test_what_a_bound_forward_tells_of_itself_is_unchanged(told: Told, name: str) -> None:
    assert getattr(told.forward, name) == getattr(Told().forward, name)


def test_the_forward_is_bound_to_its_module(told: Told) -> None:
    assert told.forward.__self__ is told  # type: ignore[attr-defined]


def test_a_forward_can_be_wrapped_by_functools(told: Told) -> None:
    wrapped = functools.wraps(told.forward)(lambda *args, **kwargs: None)
    assert inspect.signature(wrapped) == inspect.signature(Told().forward)


def test_a_forward_called_by_hand_has_the_strategy() -> None:
    model = applied()
    assert replays_in(lambda: model.forward(leaf()).sum().backward()) == 2


class Static(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(8, 8)

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin().exp()


def test_a_static_forward_works() -> None:
    model, x = Static(), leaf()
    rekindle.apply(model, "recompute")
    assert_same_step(lambda: Static.forward(x), lambda: model(x), [x])


class Instead(nn.Module):
    """Its forward is a method of an object, not a function."""

    forward = functools.partialmethod(lambda self, x, by: self.mlp(x) * by, by=2.0)

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()


def test_a_forward_that_is_a_partial_method_works() -> None:
    model, x = Instead(), leaf()
    rekindle.apply(model, "recompute")
    assert_same_step(lambda: model.mlp(x) * 2.0, lambda: model(x), [x, *model.parameters()])


# A forward of the instance's own


def twice(model: nn.Module) -> Callable[..., Any]:
    """A forward on the instance that gives twice what its class's gives."""
    forward = type(model).forward.__get__(model)

    def doubled(x: Tensor) -> Tensor:
        return 2 * forward(x)  # type: ignore[no-any-return]

    return doubled


def test_a_forward_of_the_instances_own_is_the_one_that_runs() -> None:
    model, x = Stack(2), leaf()
    own = model.blocks[0].forward = twice(model.blocks[0])
    rekindle.apply(model, "recompute")
    assert_same_step(
        lambda: model.blocks[1].__class__.forward(model.blocks[1], own(x)),
        lambda: model(x),
        [x, *model.parameters()],
    )


def test_a_forward_of_the_instances_own_comes_back() -> None:
    model = Stack(2)
    own = model.blocks[0].forward = twice(model.blocks[0])
    rekindle.apply(model, "recompute")
    rekindle.apply(model, SPILL)
    rekindle.remove(model)
    assert vars(model.blocks[0])["forward"] is own
    assert "forward" not in vars(model.blocks[1])


def wrapped_by_another(model: nn.Module) -> None:
    """What accelerate does to a model that it prepares."""
    forward = model.forward

    @functools.wraps(forward)
    def as_float(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs).float()

    model.forward = as_float


def test_removing_takes_ours_out_of_a_forward_that_another_library_put_around_it() -> None:
    model = applied()
    wrapped_by_another(model.blocks[0])
    rekindle.remove(model)
    assert replays_in(lambda: model(leaf()).sum().backward()) == 0


def test_applying_again_under_what_another_library_put_around_is_as_once() -> None:
    model = applied()
    wrapped_by_another(model.blocks[0])
    rekindle.apply(model, "recompute")
    assert replays_in(lambda: model(leaf()).sum().backward()) == 2
