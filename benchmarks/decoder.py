"""The model that every benchmark measures: a Llama-shaped decoder, written once.

Benchmarks can only be compared if they train the same model. This is a decoder without embedding
and head, from hidden states to hidden states, in the shapes whose numbers we publish, with no
dropout. The function that runs a block is an argument of the forward, so a strategy (plain,
checkpointed, offloaded, ...) is one function, and the model knows none of them.

    decoder = Decoder(SHAPES["tiny"], dtype=torch.float32)
    y = decoder(decoder.shape.hidden_states(dtype=torch.float32), run_block=my_strategy)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

RunBlock = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
"""A strategy: given a block and its input, run the block and return its output."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder and of the batch it is measured on."""

    name: str
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    batch: int
    tokens: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def hidden_states(
        self, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """A random batch of inputs of this shape."""
        return torch.randn(self.batch, self.tokens, self.dim, device=device, dtype=dtype)


SHAPES = {
    shape.name: shape
    for shape in (
        # Layers of Llama 3 8B and of Llama 3.2 1B; eight of the former are enough to measure.
        Shape("8b", dim=4096, ffn=14336, heads=32, kv_heads=8, layers=8, batch=1, tokens=8192),
        Shape("1b", dim=2048, ffn=8192, heads=32, kv_heads=8, layers=16, batch=4, tokens=4096),
        # Host-bound on any recent GPU. Heads of 64, as in `1b`, two of them to a key/value head.
        Shape("small", dim=512, ffn=1536, heads=8, kv_heads=4, layers=24, batch=8, tokens=256),
        # For smoke tests, and for host costs on a CPU.
        Shape("tiny", dim=32, ffn=64, heads=4, kv_heads=2, layers=2, batch=1, tokens=8),
    )
}


def plain(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The strategy that does nothing: autograd keeps every activation."""
    return block(x)


class RMSNorm(nn.Module):
    """Normalised in float32 and scaled in the model's type, op by op, as most models have it."""

    def __init__(self, dim: int, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return normal.to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal attention with rotary positions; several query heads share a key/value head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = nn.Linear(shape.dim, width, bias=False, device=device, dtype=dtype)
        self.k = nn.Linear(shape.dim, kv_width, bias=False, device=device, dtype=dtype)
        self.v = nn.Linear(shape.dim, kv_width, bias=False, device=device, dtype=dtype)
        self.out = nn.Linear(width, shape.dim, bias=False, device=device, dtype=dtype)
        steps = torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
        angles = torch.outer(torch.arange(shape.tokens, device=device), 500_000.0**-steps)
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat(
            (left * self.cos - right * self.sin, left * self.sin + right * self.cos), dim=-1
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = (self.shape.heads, self.shape.head_dim)
        kv_heads = (self.shape.kv_heads, self.shape.head_dim)
        q = self.rotate(self.q(x).unflatten(-1, heads).transpose(1, 2))
        k = self.rotate(self.k(x).unflatten(-1, kv_heads).transpose(1, 2))
        v = self.v(x).unflatten(-1, kv_heads).transpose(1, 2)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.ffn, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(shape.dim, shape.ffn, bias=False, device=device, dtype=dtype)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return projected


class Block(nn.Module):
    """One layer: attention and MLP, each on a normalised input and added to the residual."""

    def __init__(
        self,
        shape: Shape,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.dim, device, dtype)
        self.attention = Attention(shape, device, dtype)
        self.mlp_norm = RMSNorm(shape.dim, device, dtype)
        self.mlp = MLP(shape, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Decoder(nn.Module):
    """A stack of blocks and nothing around it."""

    def __init__(
        self,
        shape: Shape,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList(
            Block(shape, device=device, dtype=dtype) for _ in range(shape.layers)
        )

    def forward(self, x: Tensor, run_block: RunBlock = plain) -> Tensor:
        for block in self.blocks:
            x = run_block(block, x)
        return x
