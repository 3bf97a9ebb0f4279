"""Models whose storages are hard to count, with a batch of each."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention

import rekindle
from tests.planner.cases import Case
from tests.toys import Stack

WORDS, DIM, TOKENS = 48, 16, 12


class GptBlock(nn.Module):
    """Attention and an MLP, each on a normalised input and added to the residual."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.first(x)).unflatten(-1, (3, 2, -1)).transpose(1, 3)
        mixed = scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden = nn.functional.gelu(self.up(self.second(x)))
        return x + dropout(self.down(hidden), self.drop, self.training)


class Gpt(nn.Module):
    """Blocks between an embedding and a head, which share a weight if `tied`."""

    def __init__(self, tied: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(GptBlock(drop) for _ in range(3))
        self.head = nn.Linear(DIM, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = cross_entropy(self.head(x).flatten(0, 1).float(), words.flatten())
        return loss


def gpt() -> Case:
    return Gpt(), torch.randint(WORDS, (2, TOKENS))


def tied() -> Case:
    return Gpt(tied=True), torch.randint(WORDS, (2, TOKENS))


def dropped() -> Case:
    return Gpt(drop=0.1), torch.randint(WORDS, (2, TOKENS))


class Views(nn.Module):
    """Saves views of one storage, a tensor that is expanded, and one that is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.linear(x).chunk(2, -1)
        wide = x.mean(-1, keepdim=True).expand_as(x)
        return left * right.sigmoid() + wide * x


def views() -> Case:
    return nn.Sequential(*(Views() for _ in range(3))), torch.randn(8, DIM)


class InPlace(nn.Module):
    """Writes to what it made, to a view of it, and to its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu_()
        y = y.clone()
        y[:, : DIM // 2].mul_(2.0)
        return y.add_(x)


def in_place() -> Case:
    return nn.Sequential(*(InPlace() for _ in range(3))), torch.randn(8, DIM)


class Autocast(nn.Module):
    """Runs its blocks in bfloat16, whose casts of weights are cached."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(3, DIM)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.stack(x)
        return out.float().square().mean()


def autocast() -> Case:
    return Autocast(), torch.randn(8, DIM)


class Regions(nn.Module):
    """Recomputes its blocks by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(3, DIM, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.stack(x, run=rekindle.checkpoint)
        return out.square().mean()


def regions() -> Case:
    return Regions(), torch.randn(8, DIM)


class Doubled(torch.autograd.Function):
    """Saves its input and its output, and has a backward in Python."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        y = x * 2
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        x, y = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradients[0] * (y / x)


class OfFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Doubled.apply(self.linear(x))  # type: ignore[no-untyped-call]
        return found


def functions() -> Case:
    return nn.Sequential(*(OfFunctions() for _ in range(3))), torch.randn(8, DIM)


CASES: tuple[Callable[[], Case], ...] = (
    gpt,
    tied,
    dropped,
    views,
    in_place,
    autocast,
    regions,
    functions,
)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
