"""Models that `accelerator.prepare` has wrapped, or will wrap."""

from torch import nn

import rekindle
from rekindle.integrations import Strategies, library, models

accelerate = library("accelerate.utils")


def apply(model: nn.Module, what: Strategies = "recompute") -> rekindle.Applied:
    """As `rekindle.apply`, before `accelerator.prepare` or after it, with the same module paths.

    >>> import accelerate
    >>> block = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> model = accelerate.Accelerator(cpu=True).prepare(nn.Sequential(block(), block()))
    >>> apply(model)
    Sequential
      0-1: 2 x Sequential: recompute
    """
    return models.apply(_inside(model), what)


def remove(model: nn.Module) -> None:
    """Undo `apply`."""
    models.remove(_inside(model))


def _inside(model: nn.Module) -> nn.Module:
    """Unwrap a model from parallel and compiled wrappers; its mixed precision stays."""
    inside: nn.Module = accelerate.extract_model_from_parallel(model, keep_torch_compile=False)
    return inside
