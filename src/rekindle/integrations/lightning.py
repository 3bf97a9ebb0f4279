"""The `Trainer` of Lightning, as `lightning.pytorch` or as `pytorch_lightning`."""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import rekindle
from rekindle.integrations import Strategies, library, models, strategies_or_budget
from rekindle.module_attachment import annotate_oom
from rekindle.planner.input_shapes import Shapes, count_elements, format_shapes, input_shapes
from rekindle.sizes import format_bytes

lightning = library("lightning.pytorch" if find_spec("lightning") else "pytorch_lightning")
_Callback: Any = lightning.Callback
_log = logging.getLogger("rekindle")


class Callback(_Callback):  # type: ignore[misc]
    """Has a module run by strategies while a `Trainer` fits it.

    >>> callbacks = [Callback({"layers.*.mlp": "offload"})]  # Trainer(callbacks=callbacks)
    >>> callbacks = [Callback(budget="24GiB")]  # or: whatever fits, at the least cost

    Args:
        what: as for `rekindle.apply`; without it and without a budget, `"recompute"`.
        budget: as for `rekindle.fit`, instead of `what`. The first batch is planned for, with
            `training_step` as the step; a larger one later on is planned for again.
    """

    def __init__(self, what: Strategies | None = None, *, budget: int | str | None = None) -> None:
        self.what = strategies_or_budget(what, budget)
        self.budget = budget
        self.plan: rekindle.Plan | None = None
        """The last plan that was chosen for the budget."""
        self._planned: Shapes | None = None
        """The shapes of the batch that was planned for."""

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:  # noqa: ARG002
        self._planned = None
        if self.budget is not None:
            _check_step(pl_module)
            return
        applied = models.apply(pl_module, self.what)
        if [entry.path for entry in applied.entries] == [""]:
            models.remove(pl_module)
            raise ValueError(
                f"No block of {applied.model} repeats, and training_step is no region by itself: "
                'name its modules, as in Callback({"encoder": "recompute"})'
            )

    def on_train_batch_start(
        self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int
    ) -> None:
        if self.budget is None:
            return
        shapes, before = input_shapes((batch,), {}), self._planned
        if before is not None and count_elements(shapes) <= count_elements(before):
            return
        self._planned = shapes
        name = type(pl_module).__name__
        if before is not None and trainer.world_size > 1:
            _log.warning(
                "%s is given %s, larger than %s that was planned for: a step may peak above the "
                "budget. It is not planned again: ranks would have to agree on when",
                *(name, format_shapes(shapes), format_shapes(before)),
            )
            return
        with _unlogged(pl_module):
            self.plan = rekindle.fit(
                pl_module,
                _step(trainer, pl_module, batch, batch_idx),
                self.budget,
                optimizer=trainer.optimizers[0],
            )
        if before is not None:
            peak = format_bytes(self.plan.measured_peak or self.plan.predicted_peak)
            _log.warning(
                "%s is given %s, larger than %s that was planned for: planned again. A step will "
                "peak at %s, within %s",
                *(
                    name,
                    format_shapes(shapes),
                    format_shapes(before),
                    peak,
                    format_bytes(self.plan.budget),
                ),
            )

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:  # noqa: ARG002
        self.plan = rekindle.plan_of(pl_module) or self.plan
        models.remove(pl_module)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:  # noqa: ARG002
        if isinstance(exception, torch.OutOfMemoryError):
            annotate_oom(exception, pl_module)
        models.remove(pl_module)


def _check_step(module: Any) -> None:
    """Refuse a training step that cannot be run to measure it."""
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} optimizes by itself (automatic_optimization is off): its "
            "training_step cannot be measured. Call rekindle.fit, or give strategies"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(
            f"training_step of {type(module).__name__} takes batches by itself (dataloader_iter): "
            "it cannot be measured. Call rekindle.fit, or give strategies"
        )


def _step(trainer: Any, module: Any, batch: Any, number: int) -> Callable[[], Any]:
    """A training step as the trainer runs it, with its precision."""
    takes_number = len(inspect.signature(module.training_step).parameters) > 1
    given = (batch, number) if takes_number else (batch,)
    return lambda: trainer.strategy.training_step(*given)


_LOGS = ("log", "log_dict")


@contextmanager
def _unlogged(module: nn.Module) -> Iterator[None]:
    """Have what a step logs ignored."""
    own = {name: vars(module)[name] for name in _LOGS if name in vars(module)}
    vars(module).update(dict.fromkeys(_LOGS, _ignored))
    try:
        yield
    finally:
        for name in _LOGS:
            del vars(module)[name]
        vars(module).update(own)


def _ignored(*_: Any, **__: Any) -> None:
    pass
