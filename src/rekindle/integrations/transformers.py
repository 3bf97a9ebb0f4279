"""Models and the `Trainer` of transformers.

`gradient_checkpointing_enable()` and `TrainingArguments(gradient_checkpointing=True)` need none of
this: after `rekindle.patch_torch()` they run on rekindle.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import rekindle
from rekindle.integrations import Strategies, library, strategies_or_budget
from rekindle.modules.caches import forbid_cache
from rekindle.planner.placement import compute_device

transformers = library("transformers")
_layers = library("transformers.modeling_layers")
_TrainerCallback: Any = transformers.TrainerCallback

_CACHE_OFF = "_rekindle_cache_off"


def apply(model: nn.Module, what: Strategies = "recompute") -> rekindle.Applied:
    """As `rekindle.apply`, by what a model declares, and without a cache of keys while it trains.

    The blocks are the layers that `gradient_checkpointing_enable()` would checkpoint, else those
    that the model does not let be split across devices, else those that rekindle finds.

    >>> config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=3, vocab_size=16)
    >>> model = transformers.GPT2LMHeadModel(config)
    >>> apply(model)
    GPT2LMHeadModel
      transformer.h.0-2: 3 x GPT2Block: recompute
    >>> remove(model)
    """
    if isinstance(model, nn.Module) and not isinstance(what, Mapping | rekindle.Plan):
        what = dict.fromkeys(_declared(model), what) or what
    applied = rekindle.apply(model, what)
    _let_cache(model)
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            handle = forbid_cache(module)
            if handle is not None:
                vars(module)[_CACHE_OFF] = handle
    return applied


def remove(model: nn.Module) -> None:
    """Undo `apply`."""
    rekindle.remove(model)
    _let_cache(model)


class Callback(_TrainerCallback):  # type: ignore[misc]
    """Has a model run by strategies while a `Trainer` trains it.

    >>> from rekindle import policies
    >>> callbacks = [Callback(policies.keep_matmuls_and_attention)]  # Trainer(callbacks=callbacks)
    >>> callbacks = [Callback(budget="24GiB")]  # or: whatever fits, at the least cost

    Args:
        what: as for `apply`; without it and without a budget, `"recompute"`.
        budget: as for `rekindle.fit`, instead of `what`; the first batch stands for all.
        loss: with `budget`, as for `rekindle.fit`: for a model that returns no loss, as where the
            `Trainer` has a `compute_loss_func` or smooths labels.
    """

    def __init__(
        self,
        what: Strategies | None = None,
        *,
        budget: int | str | None = None,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        if loss is not None and budget is None:
            raise ValueError("loss= goes with budget=: without a budget, no step is measured")
        self.what = strategies_or_budget(what, budget)
        self.budget = budget
        self.loss = loss
        self.plan: rekindle.Plan | None = None
        """The plan that was chosen for the budget; after training, the last one."""

    def on_train_begin(
        self,
        *_: Any,
        model: nn.Module,
        train_dataloader: Any = None,
        optimizer: Any = None,
        **__: Any,
    ) -> None:
        if self.budget is None:
            apply(model, self.what)
            return
        device = compute_device(model)
        with torch.random.fork_rng(range(torch.cuda.device_count())):  # a loader draws its order
            batch = next(iter(train_dataloader))
        batch = {name: value.to(device) for name, value in batch.items()}
        was_training = model.training
        model.train()
        try:
            self.plan = rekindle.fit(model, batch, self.budget, loss=self.loss, optimizer=optimizer)
        finally:
            model.train(was_training)

    def on_train_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.plan = rekindle.plan_of(model) or self.plan
        remove(model)


def _declared(model: nn.Module) -> list[str]:
    """The paths of the blocks that a model declares, the outermost ones."""
    found = _outermost(model, lambda module: isinstance(module, _layers.GradientCheckpointingLayer))
    if found:
        return found
    kinds: set[str] = set()
    for module in model.modules():
        kinds.update(getattr(module, "_no_split_modules", None) or ())
    return _outermost(model, lambda module: type(module).__name__ in kinds)


def _outermost(model: nn.Module, is_one: Any) -> list[str]:
    found: list[str] = []
    for path, module in model.named_modules():
        inside = any(not outer or path.startswith(f"{outer}.") for outer in found)
        if not inside and is_one(module):
            found.append(path)
    return found


def _let_cache(model: nn.Module) -> None:
    for module in model.modules():
        handle = vars(module).pop(_CACHE_OFF, None)
        if handle is not None:
            handle.remove()
