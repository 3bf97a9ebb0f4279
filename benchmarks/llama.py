"""A Llama of transformers with its head and loss, as a workload: a model from another library.

Its weights are random. A strategy runs its layers through the model's own gradient checkpointing:
transformers calls the strategy where it would call `torch.utils.checkpoint`, with its arguments.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.decoder import RunBlock, Shape, plain
from benchmarks.workload import Workload


@dataclass(frozen=True)
class LlamaShape(Shape):
    """The sizes of a decoder with a head."""

    vocabulary: int
    tied: bool = True
    """True if the head has the embedding's weight."""


LLAMA = LlamaShape("llama", 2048, 8192, 32, 8, layers=16, batch=2, tokens=4096, vocabulary=128256)
"""As Llama 3.2 1B."""
LLAMA_8B = LlamaShape(
    "8b", 4096, 14336, 32, 8, layers=32, batch=1, tokens=8192, vocabulary=128256, tied=False
)
"""As Llama 3 8B."""
LLAMA_70B = LlamaShape(
    "70b", 8192, 28672, 64, 8, layers=80, batch=1, tokens=8192, vocabulary=128256, tied=False
)
"""As Llama 3 70B."""
TINY_LLAMA = LlamaShape("tiny llama", 32, 64, 4, 2, layers=6, batch=2, tokens=32, vocabulary=64)
"""For smoke tests on a CPU."""


class Llama(nn.Module):
    """From tokens to the loss; how its layers are run is up to the caller."""

    def __init__(self, shape: LlamaShape, *, device: str, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415

        super().__init__()
        self.shape = shape
        config = LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.dim,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.tokens,
            tie_word_embeddings=shape.tied,
            use_cache=False,
            attn_implementation="sdpa",
        )
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.model.train()

    def forward(self, tokens: Tensor, run_block: RunBlock = plain) -> Tensor:
        with self._layers_run_by(run_block):
            loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    @contextmanager
    def _layers_run_by(self, run_block: RunBlock) -> Iterator[None]:
        layers: Any = self.model.model.layers if run_block is not plain else []
        for layer in layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = run_block
        try:
            yield
        finally:
            for layer in layers:
                layer.gradient_checkpointing = False


class LlamaWorkload(Workload):
    """A Llama with its batch, ready to be stepped."""

    def __init__(self, shape: LlamaShape, device: str) -> None:
        self.shape = shape
        self.device = device
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.decoder = Llama(shape, device=device, dtype=dtype)
        self.x = torch.randint(shape.vocabulary, (shape.batch, shape.tokens), device=device)
        self.grad = torch.ones((), device=device)
        self.leaves = list(self.decoder.parameters())
        for leaf in self.leaves:
            leaf.grad = torch.zeros_like(leaf)
