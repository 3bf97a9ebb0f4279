"""Models that a training library is given, whichever library they come from."""

import sys
from types import ModuleType

from torch import nn

import rekindle
from rekindle.integrations import What


def apply(model: nn.Module, what: What) -> rekindle.Applied:
    """As `rekindle.apply`; where it is a model of transformers, or has one inside, as for these."""
    applied: rekindle.Applied = _its(model).apply(model, what)
    return applied


def remove(model: nn.Module) -> None:
    """Undo `apply`."""
    _its(model).remove(model)


def _its(model: nn.Module) -> ModuleType:
    transformers = sys.modules.get("transformers")  # a model of it cannot be there before it is
    if transformers is not None and isinstance(model, nn.Module):
        kind = transformers.PreTrainedModel
        if any(isinstance(module, kind) for module in model.modules()):
            from rekindle.integrations import transformers as ours  # noqa: PLC0415

            return ours
    return rekindle
