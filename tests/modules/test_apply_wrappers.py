"""`apply_activation_checkpointing`: parts of a model are wrapped in place."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrappers
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

import rekindle
from rekindle import (
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from tests.toys import Block, Mlp, Stack, gradients, same_bits


def is_mlp(module: nn.Module) -> bool:
    return isinstance(module, Mlp)


def is_linear_or_mlp(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Mlp)


def wrapped_in(model: nn.Module) -> list[str]:
    """The names of the modules that are wrapped, and what they are wrapped in."""
    wrappers = CheckpointWrapper, OffloadWrapper
    return [
        f"{name} {type(module).__name__}"
        for name, module in model.named_modules()
        if isinstance(module, wrappers)
    ]


def test_the_modules_that_are_chosen_are_wrapped() -> None:
    model = Stack(2)
    apply_activation_checkpointing(model, check_fn=is_mlp)
    assert wrapped_in(model) == [
        "blocks.0.mlp CheckpointWrapper",
        "blocks.1.mlp CheckpointWrapper",
    ]


def test_nothing_is_returned() -> None:
    assert apply_activation_checkpointing(Stack(1)) is None  # type: ignore[func-returns-value]


def test_the_model_itself_is_not_wrapped() -> None:
    model = Mlp()
    apply_activation_checkpointing(model)
    assert wrapped_in(model) == ["up CheckpointWrapper", "down CheckpointWrapper"]


def test_all_modules_are_wrapped_by_default() -> None:
    model = nn.Sequential(Mlp())
    apply_activation_checkpointing(model)
    inner = "0._checkpoint_wrapped_module"
    assert wrapped_in(model) == [
        "0 CheckpointWrapper",
        f"{inner}.up CheckpointWrapper",
        f"{inner}.down CheckpointWrapper",
    ]


@pytest.mark.parametrize(
    "wrap",
    [
        checkpoint_wrapper,
        functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
        offload_wrapper,
        functools.partial(offload_wrapper, tier="disk", min_bytes=1),
        CheckpointWrapper,
        OffloadWrapper,
    ],
    ids=["no_reentrant", "reentrant", "offload", "spill", "class", "offload class"],
)
def test_a_model_whose_parts_are_wrapped_trains_as_before(wrap: Any) -> None:
    plain, x = Stack(2, drop=0.2), torch.randn(4, 8, requires_grad=True)
    model = copy.deepcopy(plain)
    apply_activation_checkpointing(model, wrap, is_linear_or_mlp)
    assert len(wrapped_in(model)) == 6
    before, after = (
        gradients(functools.partial(each, x), [x, *each.parameters()]) for each in (plain, model)
    )
    assert all(map(same_bits, before[1], after[1]))


def test_each_wrapped_module_is_a_region() -> None:
    model = Stack(3)
    apply_activation_checkpointing(model, check_fn=is_mlp)
    with rekindle.observe() as seen:
        model(torch.randn(4, 8)).sum().backward()
    assert {name: (c.forwards, c.replays) for name, c in seen.regions.items()} == {"Mlp": (3, 3)}


def test_children_are_asked_for_before_their_parents() -> None:
    asked: list[str] = []

    def ask(module: nn.Module) -> bool:
        asked.append(type(module).__name__)
        return False

    apply_activation_checkpointing(nn.Sequential(Mlp(), nn.ReLU()), check_fn=ask)
    assert asked == ["Linear", "Linear", "Mlp", "ReLU"]


# Modules in several places


class Shared(nn.Module):
    """One Mlp under two names and in two parents."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = Mlp()
        self.c = nn.Sequential(self.a, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))  # type: ignore[no-any-return]


def test_a_module_that_occurs_in_several_places_gets_one_wrapper() -> None:
    model = Shared()
    apply_activation_checkpointing(model, check_fn=is_linear_or_mlp)
    assert model.a is model.b is model.c[0]  # type: ignore[comparison-overlap]
    assert len(wrapped_in(model)) == 3


def test_a_module_that_occurs_in_several_places_is_a_region_in_each() -> None:
    model = Shared()
    apply_activation_checkpointing(model, check_fn=is_mlp)
    with rekindle.observe() as seen:
        model(torch.randn(4, 8)).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (3, 3)


def test_a_module_that_contains_itself_is_wrapped_once() -> None:
    """Contrived: a child that knows its parent."""
    model = nn.Sequential(Mlp())
    model[0].parent = model
    apply_activation_checkpointing(model, check_fn=is_mlp)
    assert isinstance(model[0], CheckpointWrapper)


def test_an_empty_place_stays_empty() -> None:
    model = Mlp()
    model.register_module("gate", None)
    apply_activation_checkpointing(model)
    assert model.gate is None


# FSDP's policies

POLICIES: dict[str, Any] = {
    "classes": ModuleWrapPolicy({Mlp}),
    "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=is_mlp),
    "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Mlp}),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=140),
    "custom": CustomPolicy(is_linear_or_mlp),
    "own": lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel == 144,
    "none inside": lambda module, recurse, nonwrapped_numel: False,
}


def nodes(model: nn.Module) -> list[tuple[str, str]]:
    return [(name, type(module).__name__) for name, module in model.named_modules()]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_policy_chooses_what_it_chooses_for_torch(policy: Any) -> None:
    ours, theirs = Stack(2), Stack(2)
    apply_activation_checkpointing(ours, auto_wrap_policy=policy)
    torch_wrappers.apply_activation_checkpointing(theirs, auto_wrap_policy=policy)
    assert nodes(ours) == nodes(theirs)


def test_a_policy_of_sizes_counts_what_is_not_wrapped_yet() -> None:
    seen: dict[str, int] = {}

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if not recurse:
            seen[type(module).__name__] = nonwrapped_numel
        return recurse or isinstance(module, nn.LayerNorm)

    apply_activation_checkpointing(nn.Sequential(Block()), auto_wrap_policy=policy)
    assert seen == {"LayerNorm": 16, "Linear": 136, "Mlp": 280, "Block": 280}


def test_a_policy_has_precedence_over_check_fn() -> None:
    model = Stack(1)
    apply_activation_checkpointing(
        model, check_fn=lambda _: True, auto_wrap_policy=ModuleWrapPolicy({Mlp})
    )
    assert wrapped_in(model) == ["blocks.0.mlp CheckpointWrapper"]


def test_a_custom_policy_gives_options_for_each_module() -> None:
    model = nn.Sequential(Mlp(), nn.ReLU())
    policy = CustomPolicy(lambda module: {"early_stop": False} if is_mlp(module) else False)
    apply_activation_checkpointing(model, auto_wrap_policy=policy)
    assert model[0].checkpoint_fn.keywords == {"use_reentrant": False, "early_stop": False}


def test_a_custom_policy_gives_a_shared_module_one_wrapper() -> None:
    model = Shared()
    apply_activation_checkpointing(model, auto_wrap_policy=CustomPolicy(is_mlp))
    assert model.a is model.b is model.c[0]  # type: ignore[comparison-overlap]


# What is refused


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"auto_wrap_policy should be .* but got 'all'"):
        apply_activation_checkpointing(Stack(1), auto_wrap_policy="all")


def test_a_function_that_returns_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match="for Linear it returned None"):
        apply_activation_checkpointing(Mlp(), lambda module: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("wrapper", [CheckpointWrapper, OffloadWrapper])
def test_a_class_of_wrappers_is_refused_for_a_model_that_has_one(wrapper: Any) -> None:
    model = nn.Sequential(wrapper(Mlp()))
    with pytest.raises(ValueError, match=f"0 is already wrapped in a {wrapper.__name__}"):
        apply_activation_checkpointing(model, wrapper)


def test_a_second_pass_wraps_inside_the_first() -> None:
    """As torch's: so an offloaded module may be checkpointed inside."""
    model = nn.Sequential(Mlp())
    apply_activation_checkpointing(model, offload_wrapper, is_mlp)
    apply_activation_checkpointing(model, checkpoint_wrapper, is_mlp)
    assert wrapped_in(model) == [
        "0 OffloadWrapper",
        "0._checkpoint_wrapped_module CheckpointWrapper",
    ]
