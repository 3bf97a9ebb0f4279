"""`rekindle.compat.checkpoint_wrapper`: torch's names for wrappers, with torch's parameters."""

import inspect
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_module

import rekindle
from rekindle.compat import checkpoint_wrapper as compat
from tests.test_public_names import sorted_as_ruff_does
from tests.toys import Mlp

PUBLIC = sorted(
    name
    for name, value in vars(torch_module).items()
    if not name.startswith("_") and getattr(value, "__module__", "") == torch_module.__name__
)
"""Torch's module does not list them: what it defines."""
CLASSES = ["ActivationWrapper", "CheckpointWrapper", "OffloadWrapper"]


def parameters(module: Any, name: str) -> list[inspect.Parameter]:
    return list(inspect.signature(getattr(module, name)).parameters.values())


def test_torch_defines_the_names_that_we_know_of() -> None:
    assert sorted(compat.__all__) == PUBLIC


def test_the_names_are_sorted() -> None:
    assert compat.__all__ == sorted_as_ruff_does(compat.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_name_means_what_it_means_in_rekindle(name: str) -> None:
    assert getattr(compat, name) is getattr(rekindle, name)


@pytest.mark.parametrize("name", ["_CHECKPOINT_PREFIX", "_CHECKPOINT_WRAPPED_MODULE"])
def test_a_private_name_that_others_import_is_what_it_is_in_torch(name: str) -> None:
    assert getattr(compat, name) == getattr(torch_module, name)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "CheckpointImpl"])
def test_a_name_takes_the_parameters_of_torchs_first(name: str) -> None:
    """In torch's order; ours may have more."""
    theirs, ours = parameters(torch_module, name), parameters(compat, name)
    assert [(p.name, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.kind) for p in theirs]


@pytest.mark.parametrize("name", ["CheckpointWrapper", "checkpoint_wrapper"])
def test_a_parameter_has_the_default_of_torchs(name: str) -> None:
    theirs, ours = parameters(torch_module, name), parameters(compat, name)
    assert [p.default for p in ours] == [p.default for p in theirs]


def test_all_modules_are_wrapped_with_checkpoint_wrapper_by_default() -> None:
    defaults = {p.name: p.default for p in parameters(compat, "apply_activation_checkpointing")}
    assert defaults["checkpoint_wrapper_fn"] is compat.checkpoint_wrapper
    assert defaults["check_fn"](nn.ReLU()) is True
    assert defaults["auto_wrap_policy"] is None


def test_the_variants_are_torchs_own() -> None:
    """A variant that was taken from torch means the same to us, and the other way round."""
    assert compat.CheckpointImpl is torch_module.CheckpointImpl


# Note [Torch's wrappers and ours]


class TorchsOwn(torch_module.ActivationWrapper):
    def forward(self, x: Tensor) -> Tensor:
        return self._checkpoint_wrapped_module(x)  # type: ignore[no-any-return, operator]


class Own(compat.ActivationWrapper):
    def forward(self, x: Tensor) -> Tensor:
        return self._checkpoint_wrapped_module(x)  # type: ignore[no-any-return]


WRAPPERS = {
    "ours": (rekindle.checkpoint_wrapper, ["ActivationWrapper", "CheckpointWrapper"]),
    "our offload": (rekindle.offload_wrapper, ["ActivationWrapper", "OffloadWrapper"]),
    "torchs": (torch_module.checkpoint_wrapper, ["ActivationWrapper", "CheckpointWrapper"]),
    "torchs offload": (torch_module.offload_wrapper, ["ActivationWrapper", "OffloadWrapper"]),
    "a subclass of torchs": (TorchsOwn, ["ActivationWrapper"]),
    "a subclass of ours": (Own, ["ActivationWrapper"]),
    "none": (lambda module: module, []),
}


@pytest.mark.parametrize("module", [torch_module, compat], ids=["torchs", "ours"])
@pytest.mark.parametrize(("wrap", "classes"), WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapper_is_an_instance_of_torchs_class_and_of_ours(
    wrap: Any, classes: list[str], module: Any
) -> None:
    wrapper = wrap(Mlp())
    assert [name for name in CLASSES if isinstance(wrapper, getattr(module, name))] == classes


def test_a_subclass_of_our_wrapper_is_told_from_its_base() -> None:
    """What counts as ours does not count as every class that is made of it."""
    assert not isinstance(torch_module.checkpoint_wrapper(Mlp()), Own)
    assert not isinstance(TorchsOwn(Mlp()), Own)
