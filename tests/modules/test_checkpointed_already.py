"""Modules that are checkpointed already are refused by `apply`, or left alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrappers
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import rekindle
from rekindle import policies
from tests.modules.applying import SPILL, assert_as_before, assert_refused, replays_of, seen_of
from tests.toys import Block, Stack, leaf

WRAPPERS = {
    "torch's": torch_wrappers.checkpoint_wrapper,
    "torch's offload": torch_wrappers.offload_wrapper,
    "ours": rekindle.checkpoint_wrapper,
    "our offload": rekindle.offload_wrapper,
}
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


@every_wrapper
@pytest.mark.parametrize(
    "what", ["recompute", {"blocks.*": "recompute"}, {"": "recompute"}], ids=str
)
def test_a_model_with_wrapped_blocks_is_refused(wrap: Any, what: Any) -> None:
    model = Stack(2)
    rekindle.apply(model, {"blocks.0": "offload"})
    for i, block in enumerate(model.blocks):
        model.blocks[i] = wrap(block)
    assert_refused(ValueError, "Wrapper: unwrap it, or leave it out", model, what)


@every_wrapper
def test_a_block_beside_a_wrapped_one_has_its_strategy(wrap: Any) -> None:
    model, x = Stack(2), leaf()
    model.blocks[1] = wrap(model.blocks[1])
    assert_as_before(model, {"blocks.0": "recompute"}, lambda: model(x), x)


@every_wrapper
def test_a_wrapper_is_refused_itself(wrap: Any) -> None:
    assert_refused(ValueError, "contains or is in a", wrap(Block()), "recompute")


class Checkpointed(nn.Module):
    """As models of transformers were before layers knew of it: the model has the switch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.gradient_checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = torch_checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


@pytest.mark.parametrize(
    "what", ["recompute", {"layers.*": "recompute"}, {"": "recompute"}], ids=str
)
def test_a_model_that_checkpoints_its_layers_itself_is_refused(what: Any) -> None:
    assert_refused(ValueError, "checkpointed by the model itself", Checkpointed(), what)


def test_a_model_that_will_checkpoint_itself_once_it_trains_is_refused() -> None:
    model = Checkpointed().eval()
    assert_refused(ValueError, "checkpointed by the model itself", model, {"": "recompute"})


def test_a_model_whose_own_checkpointing_is_off_has_its_strategies() -> None:
    model = Checkpointed()
    model.gradient_checkpointing = False
    rekindle.apply(model, "recompute")
    assert replays_of(model) == 2


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()  # type: ignore[no-any-return]


def loss_of(model: nn.Module) -> Tensor:
    tokens = torch.arange(8).reshape(2, 4)
    return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


LLAMA_FATES: dict[str, Any] = {
    "recompute": "recompute",
    "policy": policies.keep_matmuls_and_attention,
    "spill": SPILL,
    "by path": {"model.layers.*": "recompute", "model.layers.*.mlp": "keep", "lm_head": SPILL},
}


@pytest.mark.parametrize("what", LLAMA_FATES.values(), ids=LLAMA_FATES)
def test_a_model_of_transformers_has_the_plain_gradients(what: Any) -> None:
    model = llama()
    assert_as_before(model, what, lambda: loss_of(model))


def test_every_layer_of_a_model_of_transformers_is_a_region() -> None:
    model = llama()
    rekindle.apply(model, "recompute")
    assert seen_of(lambda: loss_of(model).backward()).total.replays == 2


@pytest.mark.parametrize(
    "what",
    ["recompute", {"model.layers.0": "recompute"}, {"model.layers.*.mlp": "offload"}],
    ids=str,
)
def test_a_model_of_transformers_that_checkpoints_itself_is_refused(what: Any) -> None:
    model: Any = llama()
    model.gradient_checkpointing_enable()
    assert_refused(ValueError, r"gradient_checkpointing_disable\(\) first", model, what)


def test_a_model_of_transformers_that_is_told_to_stop_has_its_strategies() -> None:
    model: Any = llama()
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    rekindle.apply(model, "recompute")
    assert seen_of(lambda: loss_of(model).backward()).total.replays == 2
