"""Functions that return training steps, as a user of the command writes them."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.toys import Stack


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean()


def step(batch: int = 64, seq: int = 2) -> dict[str, Any]:
    print("a line of the user's own")  # noqa: T201 (which is not to be in the answer)
    model = Stack(3, 16)
    return {
        "model": model,
        "batch": torch.randn(batch, seq, 16),
        "loss": loss_of,
        "optimizer": torch.optim.AdamW(model.parameters()),
    }


def pair() -> tuple[nn.Module, Tensor]:
    return Stack(3, 16), torch.randn(64, 16)


def triple() -> tuple[Any, ...]:
    return *pair(), loss_of


def typed(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return Stack(3, 16).to(dtype), torch.randn(64, 16, dtype=dtype), loss_of


def nothing() -> None:
    pass


def turned_round() -> tuple[Any, ...]:
    return tuple(reversed(pair()))


def misspelled() -> dict[str, Any]:
    model, batch = pair()
    return {"model": model, "batch": batch, "los": loss_of}


def reading() -> tuple[Any, ...]:
    """Reads a value, which tensors of the meta device do not have."""
    count = int(torch.tensor(64).item())
    return Stack(3, 16), torch.randn(count, 16), loss_of


def failing() -> tuple[Any, ...]:
    return Stack(3, 16), torch.randn(64, 8), loss_of


not_a_function = 3
