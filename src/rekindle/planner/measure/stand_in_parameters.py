"""Parameters that stand in for a model's own, over the same memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from rekindle.planner.trace.fake_tensors import places_of
from rekindle.torch_private.tensor_identity import as_subclass_requiring_grad


@contextmanager
def on_stand_ins(model: nn.Module, but: set[nn.Parameter]) -> Iterator[None]:
    """Inside, other parameters are in the place of those that are trained, except for some.

    They have the same values, and no hooks: whoever waits for gradients of the model's own does not
    see those of a step that runs meanwhile. Note [Steps that leave no trace in a reducer].
    """
    own = [
        (tensors, name, tensor)
        for tensors, name, tensor in places_of(model)
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor not in but
    ]
    others: dict[Tensor, nn.Parameter] = {}
    try:
        for tensors, name, parameter in own:
            if parameter not in others:
                others[parameter] = _stand_in(parameter)
            tensors[name] = others[parameter]
        yield
    finally:
        for tensors, name, parameter in own:
            tensors[name] = parameter


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of the same class over the same memory, with the same attributes."""
    kind, values = type(parameter), parameter.detach()
    is_plain = issubclass(kind, nn.Parameter) and type(values) is Tensor
    other: nn.Parameter = (
        as_subclass_requiring_grad(kind, values) if is_plain else nn.Parameter(values)
    )
    for name, value in vars(parameter).items():
        vars(other).setdefault(name, value)
    return other
