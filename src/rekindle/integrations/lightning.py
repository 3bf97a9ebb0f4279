"""The `Trainer` of Lightning, as `lightning.pytorch` or as `pytorch_lightning`."""

from importlib.util import find_spec
from typing import Any

from torch import nn

from rekindle.integrations import What, library, models

lightning = library("lightning.pytorch" if find_spec("lightning") else "pytorch_lightning")
_Callback: Any = lightning.Callback


class Callback(_Callback):  # type: ignore[misc]
    """Gives a module's activations their fates while a `Trainer` fits it.

    >>> callbacks = [Callback({"layers.*.mlp": "offload"})]  # Trainer(callbacks=callbacks)
    """

    def __init__(self, what: What = "recompute") -> None:
        self.what = what

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:  # noqa: ARG002
        applied = models.apply(pl_module, self.what)
        if [entry.path for entry in applied.entries] == [""]:
            models.remove(pl_module)
            raise ValueError(
                f"No block of {applied.model} repeats, and training_step is no region by itself: "
                'name its modules, as in Callback({"encoder": "recompute"})'
            )

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:  # noqa: ARG002
        models.remove(pl_module)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:  # noqa: ARG002
        models.remove(pl_module)
