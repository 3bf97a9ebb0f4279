"""Adapters of peft on a frozen base, with no `enable_input_require_grads`."""

from torch import nn

import rekindle
from rekindle.integrations import Strategies, library, models

peft = library("peft")


def apply(model: nn.Module, what: Strategies = "recompute") -> rekindle.Applied:
    """As `rekindle.apply`, to the model that has adapters, with the module paths it has by itself.

    >>> layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
    >>> model = peft.get_peft_model(layers, peft.LoraConfig(target_modules=["0.0", "2.0"]))
    >>> apply(model)
    Sequential
      0-2: 3 x Sequential: recompute
    """
    _refuse_prefixes(model)
    return models.apply(_base(model), what)


def remove(model: nn.Module) -> None:
    """Undo `apply`."""
    models.remove(_base(model))


def _base(model: nn.Module) -> nn.Module:
    if not isinstance(model, peft.PeftModel):
        return model
    base: nn.Module = model.get_base_model()
    return base


def _refuse_prefixes(model: nn.Module) -> None:
    """Refuse adapters that train a cache of keys and values: a replay would write to it again."""
    kinds = {peft.PeftType.PREFIX_TUNING, getattr(peft.PeftType, "CARTRIDGE", None)}
    for name, config in getattr(model, "peft_config", {}).items():
        if config.peft_type in kinds:
            raise ValueError(
                f"The adapter {name!r} is {config.peft_type.value}, which gives the model a cache "
                "of keys and values: its layers cannot be run twice. Try prompt tuning, or LoRA"
            )
