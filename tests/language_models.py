"""A hand-written language model whose logits are most of its memory, and its plain gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.toys import Block, same_bits

WORDS, WIDTH, LENGTH, SAMPLES = 2048, 16, 64, 4
LOGITS = SAMPLES * LENGTH * WORDS * 4
"""Bytes of all logits."""
Loss = Callable[[Tensor, Tensor], Tensor]


def next_word(logits: Tensor, words: Tensor) -> Tensor:
    """The loss as models write it: in float32, shifted by one."""
    shifted = logits.float()[:, :-1].reshape(-1, logits.shape[-1])
    return functional.cross_entropy(shifted, words[:, 1:].reshape(-1))


class LanguageModel(nn.Module):
    """Embedding, blocks, norm and head; returns the loss if it is given one."""

    def __init__(self, depth: int = 3, words: int = WORDS, loss: Loss | None = next_word) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.loss = loss

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits if self.loss is None else self.loss(logits, words)


def some_words(samples: int = SAMPLES, length: int = LENGTH, words: int = WORDS) -> Tensor:
    """A batch of token ids."""
    return torch.randint(words, (samples, length))


def gradients_of(model: nn.Module, *args: Any, loss: Callable[..., Tensor] | None = None) -> Any:
    """The loss and all gradients of one step."""
    model.zero_grad()
    out = model(*args)
    found = out if loss is None else loss(out)
    found.backward()
    return found.detach(), [p.grad for p in model.parameters()]


def same(one: Any, other: Any) -> bool:
    """True if two losses, and all gradients, are the same bit for bit."""
    pairs = zip(one[1], other[1], strict=True)
    return torch.equal(one[0], other[0]) and all(same_bits(a, b) for a, b in pairs)
