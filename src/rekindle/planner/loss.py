"""The loss of a training step: given by the user, or found in what the model returns."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from rekindle.planner.caller_warnings import warn_at_caller

A_FUNCTION = "a function"
"""The text for a batch that is a function."""

Form = Literal["tensor", "sequence", "mapping"]
"""The form of a batch: one value, several by position, or several by keyword."""


@dataclass(eq=False)
class Loss:
    """A user's loss: a function of the model's output, or of the output and the batch."""

    function: Callable[..., Any]
    takes_batch: bool
    form: Form
    """The form of the batch it was given with; later batches are passed to it in the same form."""
    failed: bool = False
    """True if the function raised an error in its last call."""

    def __call__(self, out: Any, batch: Any) -> Tensor:
        self.failed = True
        loss = self.function(out, batch) if self.takes_batch else self.function(out)
        self.failed = False
        if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
            raise ValueError(
                "loss should return a scalar tensor that requires a gradient, but returned "
                f"{_describe(loss)}"
            )
        return loss


def checked_loss(loss: Any, batch: Any) -> Loss | None:
    """Validate the `loss=` of `profile` and `fit`; None if none is given.

    A callable that requires two positional arguments gets the output and the batch, one that
    requires fewer gets the output. Of an `nn.Module`, the signature of `forward` counts; a builtin
    without a signature gets the output.

    >>> checked_loss(lambda out: out.mean(), ()).takes_batch
    False
    >>> checked_loss(nn.MSELoss(), ()).takes_batch
    True
    """
    if loss is None:
        return None
    if not callable(loss) or isinstance(loss, Tensor | type):
        kind = loss.__name__ if isinstance(loss, type) else type(loss).__name__
        raise TypeError(
            "loss should be a function of the model's output, or of the output and the batch, but "
            f"got {kind}"
        )
    if callable(batch) and not isinstance(batch, Tensor):
        raise ValueError(
            "loss= goes with a batch, but the batch is a function: it returns the loss itself"
        )
    return Loss(loss, _required(loss) == 2, form_of(batch))


def _required(loss: Callable[..., Any]) -> int:
    """Return the number of positional arguments that a callable requires."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # a builtin without a signature, such as Tensor.mean
        return 1
    parameters = signature.parameters.values()
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind == p.VAR_POSITIONAL for p in parameters)
    required = sum(p.default is p.empty for p in by_position)
    by_name = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY and p.default is p.empty]
    if required > 2 or by_name or not (by_position or takes_any):
        raise TypeError(
            f"loss is called with the output, or with the output and the batch, but takes "
            f"{signature}"
        )
    return required


def form_of(batch: Any) -> Form:
    """Return the form of a batch."""
    if isinstance(batch, Mapping):
        return "mapping"
    return "sequence" if isinstance(batch, tuple | list) else "tensor"


def batch_in_form(
    form: Form, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the arguments of a model's call as a batch of a form.

    A call by keyword where the batch has none, or the other way round, is matched by the
    signature of the model's forward.

    >>> batch_in_form("tensor", nn.Identity(), (3,), {})
    3
    >>> batch_in_form("mapping", nn.Identity(), (3,), {})
    {'input': 3}
    """
    if form == "mapping":
        if not args:
            return kwargs
        return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    values = (*args, *kwargs.values())
    return values[0] if form == "tensor" and values else values


def find_loss(out: Any) -> Tensor | None:
    """Return the loss in a model's output: a scalar, `.loss` or `["loss"]`; None without one."""
    if isinstance(out, Tensor):
        return out if out.dim() == 0 and out.requires_grad else None
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    is_scalar = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
    return loss if is_scalar else None


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__}"
    without = "" if value.requires_grad else " that requires none"
    return f"a tensor of shape {list(value.shape)}{without}"


def warn_without_loss(batch: str) -> None:
    """Warn, at the line that called rekindle, that a plan for a batch does not count the loss."""
    how = (
        "Return the loss from the function."
        if batch == A_FUNCTION
        else "Give it, as loss=lambda out: criterion(out, labels)."
    )
    warn_at_caller(
        "The loss is not in the plan: the step returned no scalar loss, and the sum of its outputs "
        f"stands for it. The real step peaks higher, by what the loss takes. {how}"
    )
