"""Models with a batch of each kind, for tests of profiles on fake tensors."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import rekindle
from benchmarks.decoder import Decoder, Shape
from tests.planner.cases import CASES, Case
from tests.toys import Stack


def gpt2() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=4, use_cache=False
    )
    config.bos_token_id = config.eos_token_id = None
    config.loss_type = "ForCausalLMLoss"
    tokens = torch.randint(64, (2, 16))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens}


def padded_gpt2() -> Case:
    model, batch = gpt2()
    mask = torch.ones_like(batch["input_ids"])
    mask[:, -3:] = 0
    return model, {**batch, "attention_mask": mask}


def decoder() -> Case:
    """Heads that share keys, and a rotary table that is a buffer larger than what is copied."""
    shape = Shape("test", dim=64, ffn=96, heads=2, kv_heads=1, layers=2, batch=1, tokens=600)
    return Decoder(shape, dtype=torch.float32), shape.hidden_states(dtype=torch.float32)


def that_learns() -> Case:
    return Stack(3, 16, 0.1), torch.randn(64, 16, requires_grad=True)


def torch_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(2, 16, 32)


def frozen_in_half() -> Case:
    model = Stack(4, 16, 0.1).to(torch.bfloat16)
    model.blocks[:2].requires_grad_(False)
    return model, torch.randn(64, 16, dtype=torch.bfloat16)


class Recurrent(nn.Module):
    """Its weights are known by another way than as parameters, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.cell(x)[0]
        return out


def recurrent() -> Case:
    return nn.Sequential(*(Recurrent() for _ in range(2))), torch.randn(4, 2, 16)


class Shifted(nn.Module):
    """Its gradients are views of others: one that it shares, and one number for all places."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.repeated = (nn.Parameter(torch.randn(64, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shared).exp() + self.shared + self.repeated.sum()


def shifted() -> Case:
    return nn.Sequential(*(Shifted() for _ in range(2))), torch.randn(64, 16)


EVERY = {
    **CASES,
    **{
        case.__name__: case
        for case in (
            gpt2,
            padded_gpt2,
            decoder,
            that_learns,
            torch_encoder,
            frozen_in_half,
            recurrent,
            shifted,
        )
    },
}
every_case = pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)


@cache
def fake_stack_profile() -> rekindle.Profile:
    """A profile for the tests that want one and not its making."""
    torch.manual_seed(0)
    return rekindle.profile(*that_learns(), device="meta", like="H200")
