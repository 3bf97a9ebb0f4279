"""Any function of rows of logits as a row function: autograd runs in each tile, and ends there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rekindle.errors import RekindleError
from rekindle.losses.gradients import gradients
from rekindle.losses.row_function import Pullback, Values
from rekindle.torch_private.pytrees import tree_flatten


@dataclass
class Autocast:
    """The state of autocast on a device, which a tile's backward needs again."""

    device_type: str
    dtype: torch.dtype
    enabled: bool

    @classmethod
    def now(cls, device_type: str) -> "Autocast":
        dtype = torch.get_autocast_dtype(device_type)
        return cls(device_type, dtype, torch.is_autocast_enabled(device_type))

    def enter(self) -> torch.autocast:
        return torch.autocast(self.device_type, self.dtype, self.enabled)


@dataclass
class ByAutograd:
    """The row function `function(logits, *args)`, which returns one tensor or a tree of them."""

    function: Callable[..., Any]
    by_token: Sequence[bool]
    autocast: Autocast
    structure: Any = field(default=None, init=False)
    """The tree that the function returns, once it has run."""

    def forward(self, logits: Tensor, args: Sequence[Any]) -> Values:
        given = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
        values = self._run(logits.detach(), given)
        if any(value.requires_grad for value in values):
            raise RekindleError(
                f"{name_of(self.function)} uses tensors that require a gradient and are not among "
                "its arguments: they would get none. Pass them as arguments: "
                "linear_per_token(hidden, weight, function, tensor)."
            )
        return values

    def plain(self, logits: Tensor, args: Sequence[Any]) -> Values:
        return self._run(logits, args)

    def vjp(self, logits: Tensor, args: Sequence[Any]) -> tuple[Values, Pullback]:
        leaf = logits.detach().requires_grad_()
        given = [
            arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, Tensor) else arg
            for arg in args
        ]
        values = self._run(leaf, given)

        def pullback(grads: Values) -> tuple[Tensor, Values]:
            of_logits, *of_args = gradients(values, (leaf, *given), grads)
            return torch.zeros_like(leaf) if of_logits is None else of_logits, of_args

        return values, pullback

    def _run(self, logits: Tensor, args: Sequence[Any]) -> list[Tensor]:
        with torch.enable_grad(), self.autocast.enter():
            values, self.structure = tree_flatten(self.function(logits, *args))
        for value in values:
            if not isinstance(value, Tensor) or value.shape[:1] != logits.shape[:1]:
                found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise RekindleError(
                    f"{name_of(self.function)} should return tensors with a row per token, so with "
                    f"{len(logits)} rows for logits of shape {list(logits.shape)}, but returned "
                    f"{found}. If it reduces over tokens, do so with what linear_per_token returns."
                )
        return values


def name_of(function: Any) -> str:
    """The name of a function, for an error."""
    return getattr(function, "__qualname__", type(function).__name__)
