"""Small language models of transformers, and one with a bias that blocks share."""

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
Case = tuple[nn.Module, dict[str, Tensor]]
TOKENS = {
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "vocab_size": 64,
    "use_cache": False,
}


def gpt2(device: str = "cpu") -> Case:
    config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, n_positions=32, **TOKENS)
    return case_of(transformers.GPT2LMHeadModel(config), device)


def bert(device: str = "cpu") -> Case:
    config = transformers.BertConfig(
        num_hidden_layers=3,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        **TOKENS,
    )
    return case_of(transformers.BertForMaskedLM(config), device)


def t5(device: str = "cpu") -> Case:
    config = transformers.T5Config(
        num_layers=2, d_model=32, d_kv=16, num_heads=2, d_ff=64, decoder_start_token_id=0, **TOKENS
    )
    return case_of(transformers.T5ForConditionalGeneration(config), device)


def case_of(model: nn.Module, device: str) -> Case:
    ids = torch.randint(64, (4, 32), device=device)
    return model.to(device).train(), {"input_ids": ids, "labels": ids}


class Biased(nn.Module):
    """A block that hands on what it was given beside the state: a bias, as T5's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = x.new_ones(64, 8, 8) if bias is None else bias
        return self.linear(x).relu() + (bias @ x).sum(0), bias


class SharesABias(nn.Module):
    """The first block makes a bias, much larger than all else, that every other one uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Biased() for _ in range(6)])

    def forward(self, x: Tensor) -> Any:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return types.SimpleNamespace(loss=x.sum())


def shared_bias(device: str = "cpu") -> Case:
    return SharesABias().to(device), {"x": torch.randn(8, 8, device=device)}


every_model = pytest.mark.parametrize("case", [gpt2, bert, t5])
