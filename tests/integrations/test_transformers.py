"""Models of transformers, trained with strategies and without: the same curve, bit for bit."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle import policies

transformers = pytest.importorskip("transformers")

from rekindle.integrations import transformers as ours  # noqa: E402
from tests.integrations.families import (  # noqa: E402
    FAMILIES,
    STEPS,
    every_family,
    every_what,
    plain,
    same,
    train,
)


@every_what
@every_family
def test_training_with_strategies_is_training_without_them(name: str, what: Any) -> None:
    family = FAMILIES[name]
    model = family.build()
    ours.apply(model, what)
    with rekindle.observe() as seen:
        curve = train(model, family.batch())
    assert same(curve, plain(name))
    assert (seen.total.forwards, seen.total.replays) == (family.layers * STEPS,) * 2


class Bare(transformers.PreTrainedModel):  # type: ignore[misc]
    """A model that knows nothing of checkpointing, as those that come with code of their own."""

    config_class = transformers.PretrainedConfig

    def __init__(self, config: Any, names: list[str]) -> None:
        super().__init__(config)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.head = nn.Bilinear(4, 4, 1)
        self._no_split_modules = names


def paths(model: nn.Module) -> list[str]:
    return [entry.path for entry in ours.apply(model, "recompute").entries]


def test_blocks_are_the_modules_that_a_model_does_not_let_be_split() -> None:
    assert paths(Bare(transformers.PretrainedConfig(), ["Bilinear"])) == ["head"]


def test_blocks_of_a_model_that_declares_none_are_those_that_rekindle_finds() -> None:
    assert paths(Bare(transformers.PretrainedConfig(), [])) == ["parts.0", "parts.1", "parts.2"]


def test_modules_are_named_by_their_paths() -> None:
    """Field note 30: not all or nothing."""
    family = FAMILIES["llama"]
    model = family.build()
    ours.apply(model, {"model.layers.*.mlp": "recompute", "model.layers.2": "recompute"})
    with rekindle.observe() as seen:
        curve = train(model, family.batch(), steps=1)
    assert same(curve, train(family.build(use_cache=False), family.batch(), steps=1))
    assert {name: counts.forwards for name, counts in seen.regions.items()} == {
        "LlamaMLP.forward": 3,
        "LlamaDecoderLayer.forward": 1,
    }


def has_cache(model: nn.Module, *args: Any, **options: Any) -> bool:
    tokens = FAMILIES["llama"].batch()["input_ids"]
    return model(tokens, *args, **options).past_key_values is not None


@pytest.fixture
def llama() -> nn.Module:
    return FAMILIES["llama"].build()


def test_a_cache_is_off_while_training(llama: nn.Module) -> None:
    """Whoever asks for it, as with transformers' own switch: a replay would fill it again."""
    assert has_cache(llama)
    ours.apply(llama)
    assert not has_cache(llama)
    assert not has_cache(llama, use_cache=True)
    assert not has_cache(llama, None, None, None, None, None, True)
    assert not has_cache(llama.model)


def test_a_cache_is_on_in_evaluation(llama: nn.Module) -> None:
    ours.apply(llama)
    assert has_cache(llama.eval())


def test_remove_lets_a_model_have_its_cache_again(llama: nn.Module) -> None:
    before = {name: set(vars(module)) for name, module in llama.named_modules()}
    ours.apply(llama)
    ours.apply(llama)
    ours.remove(llama)
    assert has_cache(llama)
    assert {name: set(vars(module)) for name, module in llama.named_modules()} == before
    assert not any(module._forward_pre_hooks for module in llama.modules())


def test_what_is_saved_and_generated_is_that_of_the_plain_model(
    llama: nn.Module, tmp_path: Path
) -> None:
    prompt = FAMILIES["llama"].batch()["input_ids"]
    llama.eval()
    expected = llama.generate(prompt, max_new_tokens=4, do_sample=False)
    ours.apply(llama)
    assert torch.equal(llama.generate(prompt, max_new_tokens=4, do_sample=False), expected)
    llama.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.use_cache
    assert same(list(loaded.parameters()), list(llama.parameters()))


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_has_strategies_and_a_cache_of_its_own(
    copied: Callable[[nn.Module], nn.Module], llama: nn.Module
) -> None:
    ours.apply(llama)
    twin = copied(llama)
    ours.remove(llama)
    assert has_cache(llama)
    with rekindle.observe() as seen:
        assert same(train(twin, FAMILIES["llama"].batch()), plain("llama"))
    assert (seen.total.forwards, seen.total.replays) == (3 * STEPS,) * 2
    ours.remove(twin)
    assert has_cache(twin)


# Transformers' own switch


@every_family
def test_the_switch_of_transformers_takes_a_policy(name: str, patched: Any) -> None:
    family = FAMILIES[name]
    model = family.build()
    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": policies.keep_matmuls_and_attention}
    )
    with rekindle.observe() as seen:
        curve = train(model, family.batch())
    assert same(curve, plain(name))
    assert (seen.total.forwards, seen.total.replays) == (family.layers * STEPS,) * 2


def test_the_switch_of_transformers_takes_every_nth_layer(llama: nn.Module, patched: Any) -> None:
    llama.gradient_checkpointing_enable(every_n_layers=2)
    with rekindle.observe() as seen:
        assert same(train(llama, FAMILIES["llama"].batch()), plain("llama"))
    assert (seen.total.forwards, seen.total.replays) == (2 * STEPS,) * 2


def test_a_model_whose_switch_is_on_is_refused(llama: nn.Module) -> None:
    llama.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"call gradient_checkpointing_disable\(\) first"):
        ours.apply(llama)
    assert has_cache(llama.eval())
