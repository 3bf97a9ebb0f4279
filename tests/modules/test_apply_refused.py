"""Arguments of `apply` that are refused, with an error that says why; and those that look it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle import policies
from tests.modules.applying import (
    Shaped,
    assert_as_before,
    assert_refused,
    managed,
    replays_of,
    seen_of,
)
from tests.toys import Mlp, Stack, leaf


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("blocks.*.mpl", "blocks.*.mlp"),
        ("block.*", "blocks"),
        ("blokcs.0.norm", "blocks.0.norm"),
        ("layers.*.mlp", "blocks.*.mlp"),
    ],
)
def test_a_typo_is_told_with_what_may_be_meant(pattern: str, meant: str) -> None:
    model = Stack(2)
    rekindle.apply(model, "recompute")
    assert_refused(ValueError, r"Did you mean", model, {pattern: "offload"})
    with pytest.raises(ValueError, match=r"No module") as told:
        rekindle.apply(model, {pattern: "offload"})
    assert repr(pattern) in str(told.value)
    assert meant in str(told.value)


@pytest.mark.parametrize(
    "pattern", ["zzz", "blocks.9", "blocks.0.", ".blocks", "blocks..0", "Blocks.0", "mlp", " "]
)
def test_a_pattern_that_names_nothing_is_refused(pattern: str) -> None:
    assert_refused(ValueError, "No module of the model matches", Stack(2), {pattern: "recompute"})


def test_a_typo_beside_a_good_pattern_is_refused() -> None:
    what = {"blocks.*": "recompute", "blocks.*.mpl": "keep"}
    assert_refused(ValueError, r"blocks\.\*\.mpl", Stack(2), what)


def test_a_pattern_that_names_only_what_is_never_called_is_refused() -> None:
    """A list of modules has no forward: a strategy for it alone would do nothing."""
    model = Stack(2)
    try:
        rekindle.apply(model, {"blocks": "recompute"})
    except ValueError:
        return
    assert replays_of(model) > 0


# Wrong types


@pytest.mark.parametrize("model", [None, 3, "model", nn.Linear, [nn.Linear(2, 2)], torch.relu])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=r"apply\(\) takes a model, but got"):
        rekindle.apply(model, "recompute")
    with pytest.raises(TypeError, match=r"remove\(\) takes a model, but got"):
        rekindle.remove(model)


@pytest.mark.parametrize("what", ["recomputed", "", "Recompute", "drop", "RECOMPUTE"])
@pytest.mark.parametrize("in_a_mapping", [False, True])
def test_an_unknown_strategy_is_refused_with_the_known_ones(what: str, in_a_mapping: bool) -> None:
    model = Stack(2)
    rekindle.apply(model, "recompute")
    given: Any = {"blocks.*": what} if in_a_mapping else what
    assert_refused(ValueError, "keep.*recompute.*offload.*spill", model, given)


@pytest.mark.parametrize(
    "what",
    [
        *(None, True, 3, ["recompute"], ("blocks.*", "recompute"), {"recompute"}, nn.Linear(2, 2)),
        *(rekindle.offload, policies.keep, rekindle.CheckpointPolicy.MUST_SAVE),
        rekindle.noop_context_fn,
    ],
    ids=lambda what: getattr(what, "__name__", str(what)),
)
@pytest.mark.parametrize("in_a_mapping", [False, True])
def test_what_is_neither_strategy_nor_policy_is_refused(what: Any, in_a_mapping: bool) -> None:
    model = Stack(2)
    rekindle.apply(model, "recompute")
    given = {"blocks.*": what} if in_a_mapping else what
    assert_refused(TypeError, "A module is given a strategy", model, given)


@pytest.mark.parametrize("pattern", [0, None, ("blocks", 0), Stack])
def test_a_pattern_that_is_no_string_is_refused(pattern: Any) -> None:
    assert_refused(TypeError, "A pattern is a string", Stack(2), {pattern: "recompute"})


def test_apply_needs_to_be_told_what() -> None:
    with pytest.raises(TypeError, match="what"):
        rekindle.apply(Stack(2))  # type: ignore[call-arg]


# Models out of the ordinary


def test_a_model_without_parameters_is_applied_to() -> None:
    model, x = nn.Sequential(nn.Tanh(), nn.Sigmoid()), leaf()
    assert_as_before(model, "recompute", lambda: model(x), x)


def test_a_model_without_modules_is_applied_to() -> None:
    model, x = nn.Tanh(), leaf()
    assert_as_before(model, "recompute", lambda: model(x), x)


def test_an_empty_model_is_applied_to() -> None:
    model = nn.Sequential()
    x = leaf()
    rekindle.apply(model, "recompute")
    assert torch.equal(model(x), x)


def test_a_name_with_the_letters_of_a_pattern_can_be_named() -> None:
    model = nn.ModuleDict({"a[0]": Mlp(), "a0": Mlp()})
    rekindle.apply(model, {"a[[]0]": "recompute"})
    assert managed(model) == ["a[0]"]


def test_a_part_whose_name_has_the_letters_of_a_pattern_has_its_strategy() -> None:
    parts = nn.ModuleDict({"a[0]": Mlp()})
    model = Shaped(lambda _, x: parts["a[0]"](x))
    model.parts = parts
    rekindle.apply(model, {"": "recompute", "parts.*": "keep"})
    seen = seen_of(lambda: model(leaf()).sum().backward())
    plain = Shaped(lambda mlp, x: mlp(x))
    rekindle.apply(plain, {"": "recompute", "mlp": "keep"})
    other = seen_of(lambda: plain(leaf()).sum().backward())
    assert seen.total.bytes_held == other.total.bytes_held


def test_a_module_that_contains_itself_is_applied_to() -> None:
    model = Mlp()
    vars(model)["_modules"]["down"].__dict__["parent"] = model  # no submodule, as people do it
    x = leaf()
    assert_as_before(model, "recompute", lambda: model(x), x)


def test_a_model_on_the_meta_device_is_applied_to() -> None:
    with torch.device("meta"):
        model = Stack(2)
    rekindle.apply(model, "recompute")
    assert replays_of(model.to_empty(device="cpu")) == 2


def test_a_traced_module_is_applied_to() -> None:
    model, x = torch.fx.symbolic_trace(Mlp()), leaf()
    assert_as_before(model, {"": "recompute"}, lambda: model(x), x)


def test_applying_does_not_change_what_it_is_given() -> None:
    what = {"blocks.*": "recompute", "**.mlp": "keep"}
    before = copy.copy(what)
    rekindle.apply(Stack(2), what)
    assert what == before
