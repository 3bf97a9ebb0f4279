"""The toy models and helpers that tests share."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout


class Mlp(nn.Module):
    """Linear, GELU, Linear, and dropout if asked for."""

    def __init__(self, dim: int = 8, hidden: int = 16, drop: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return self.down(dropout(nn.functional.gelu(self.up(x)), self.drop, self.training))


class Block(nn.Module):
    """A transformer block without attention: norm, Mlp, residual."""

    def __init__(self, dim: int = 8, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 2 * dim, drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    """Blocks in a row, each run by `run(block, x)`."""

    def __init__(self, depth: int = 3, dim: int = 8, drop: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, drop) for _ in range(depth))

    def forward(
        self, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor] | None = None
    ) -> Tensor:
        for block in self.blocks:
            x = block(x) if run is None else run(block, x)
        return x


def leaf(*shape: int, **options: Any) -> Tensor:
    """Random numbers that require a gradient; two rows for a `Stack`, if no shape is given."""
    return torch.randn(*(shape or (2, 8)), requires_grad=True, **options)


def wave(x: Tensor) -> Tensor:
    """Three ops, each of which saves a tensor."""
    return x.sin().exp().cos()


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal in shape, dtype and every bit, NaNs included; None equals None."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num()) and torch.equal(
        a.detach().isnan(), b.detach().isnan()
    )


def same_state(a: nn.Module, b: nn.Module) -> bool:
    one, other = a.state_dict(), b.state_dict()
    return list(one) == list(other) and all(same_bits(one[key], other[key]) for key in one)


def gradients(
    run: Callable[[], Any],
    leaves: Iterable[Tensor],
    seed: int = 0,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> tuple[Any, list[Tensor | None], Tensor]:
    """Run from a fixed seed, back-propagate the sum of all outputs, and return outputs, gradients
    of `leaves` (their `.grad`s are cleared first) and the RNG state after the step."""
    leaves = list(leaves)
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(seed)
    out = run()
    backward(total(out))
    grads = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    return out, grads, torch.get_rng_state()


def total(out: Any) -> Tensor:
    """A scalar that depends on every tensor of a nested output, each with a weight of its own."""
    leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
    parts = [(t.float() * (i + 1)).sum() for i, t in enumerate(leaves) if t.requires_grad]
    return torch.stack(parts).sum()


def assert_same_step(
    plain: Callable[[], Any], other: Callable[[], Any], leaves: Sequence[Tensor], **options: Any
) -> None:
    """Both runs give the same outputs, gradients and RNG state, bit for bit."""
    out_a, grads_a, rng_a = gradients(plain, leaves, **options)
    out_b, grads_b, rng_b = gradients(other, leaves, **options)
    flat_a, flat_b = (torch.utils._pytree.tree_leaves(out) for out in (out_a, out_b))
    assert len(flat_a) == len(flat_b)
    for a, b in zip(flat_a, flat_b, strict=True):
        assert same_bits(a, b) if isinstance(a, Tensor) else a == b
    for i, (a, b) in enumerate(zip(grads_a, grads_b, strict=True)):
        assert same_bits(a, b), f"gradient {i} differs"
    assert torch.equal(rng_a, rng_b), "the step left another RNG state"
