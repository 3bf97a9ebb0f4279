"""A training step in any size, as the command works on it."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class Sizes:
    """The sizes that the command line asks for; None is the source's own."""

    batch: int | None = None
    seq: int | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Step:
    """A training step, as `rekindle.profile` takes it."""

    model: nn.Module
    batch: Any
    loss: Any = None
    optimizer: torch.optim.Optimizer | None = None


class Source(Protocol):
    """A training step in any size."""

    @property
    def optimizer(self) -> str | None:
        """The optimizer to count if the command line names none; None for the step's own."""

    def step(self, sizes: Sizes, place: str) -> Step:
        """Make the step on a device."""

    def batch(self, step: Step, sizes: Sizes, place: str) -> Any:
        """Make a batch of another size for the model of a step."""

    def most(self, over: str) -> int | None:
        """The largest size that the model is made for, if that is known."""


def with_optimizer(step: Step, kind: type[torch.optim.Optimizer] | None) -> Step:
    """Return a step with an optimizer of a class, for the parameters that are trained."""
    if kind is None:
        return replace(step, optimizer=None)
    trained = [parameter for parameter in step.model.parameters() if parameter.requires_grad]
    make: Any = kind
    return replace(step, optimizer=make(trained))
