"""Models that a training library is given, whichever library they come from."""

import sys
from types import ModuleType

from torch import nn

import rekindle
from rekindle.integrations import Strategies


def apply(model: nn.Module, what: Strategies) -> rekindle.Applied:
    """As `rekindle.apply`; if a model of transformers is in it, as `integrations.transformers`."""
    applied: rekindle.Applied = _library_for(model).apply(model, what)
    return applied


def remove(model: nn.Module) -> None:
    """Undo `apply`."""
    _library_for(model).remove(model)


def _library_for(model: nn.Module) -> ModuleType:
    """The module whose `apply` and `remove` are for a model: `rekindle`, or an integration."""
    transformers = sys.modules.get("transformers")  # a model of it cannot be there before it is
    if transformers is not None and isinstance(model, nn.Module):
        kind = transformers.PreTrainedModel
        if any(isinstance(module, kind) for module in model.modules()):
            from rekindle.integrations import transformers as ours  # noqa: PLC0415

            return ours
    return rekindle
