"""Small models of transformers, one of each family, and their training curves."""

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rekindle import policies
from tests.toys import same_bits

transformers = pytest.importorskip("transformers")


STEPS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32}


@dataclass(frozen=True)
class Family:
    """A model class with a tiny configuration, what it is fed, and how many layers it runs."""

    model: str
    config: str
    options: dict[str, Any]
    layers: int = 3
    feed: str = "tokens"

    def build(self, **more: Any) -> nn.Module:
        torch.manual_seed(1)
        config = getattr(transformers, self.config)(**self.options, **more)
        model: nn.Module = getattr(transformers, self.model)(config)
        return model.train()

    def batch(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(2)
        if self.feed == "images":
            return {
                "pixel_values": torch.randn(2, 3, 8, 8, generator=generator),
                "labels": torch.tensor([0, 1]),
            }
        tokens = torch.randint(1, 64, (2, 8), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**DECODER, "attention_dropout": 0.1, "attn_implementation": "eager"},
    ),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 8}),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32},
    ),
    "bert": Family("BertForMaskedLM", "BertConfig", {**SIZES, "max_position_embeddings": 32}),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        layers=2 + 3,
    ),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {**SIZES, "image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.1},
        feed="images",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        {
            **DECODER,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,  # these leave a region by the side, for another loss
        },
    ),
    "qwen3 moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "mamba": Family(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 3},
    ),
    "recurrent gemma": Family(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {**SIZES, "head_dim": 8, "num_key_value_heads": 1, "lru_width": 32},
    ),
}
every_family = pytest.mark.parametrize("name", FAMILIES)
WHATS: dict[str, Any] = {
    "recompute": "recompute",
    "policy": policies.keep_matmuls_and_attention,
}
every_what = pytest.mark.parametrize("what", WHATS.values(), ids=WHATS)

Curve = list[Tensor]


def train(model: nn.Module, batch: dict[str, Tensor], steps: int = STEPS) -> Curve:
    """The loss of each step, then every gradient of the last one, then every parameter."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    curve: Curve = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        curve.append(loss.detach())
    curve += [p.grad for p in model.parameters() if p.grad is not None]
    return [*curve, *(p.detach() for p in model.parameters())]


@functools.cache
def plain(name: str) -> Curve:
    """The curve without strategies, and without a cache of keys, which lays them out in another
    way: that alone changes the last bits of GPT-2 and T5."""
    return train(FAMILIES[name].build(use_cache=False), FAMILIES[name].batch())


def same(a: Curve, b: Curve) -> bool:
    return len(a) == len(b) and all(map(same_bits, a, b))
