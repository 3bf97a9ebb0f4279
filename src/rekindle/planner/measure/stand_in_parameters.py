"""Parameters in the place of a model's own, over the same memory, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from rekindle.planner.trace.fake_tensors import tensor_slots
from rekindle.torch_private.tensor_identity import as_subclass_requiring_grad


@contextmanager
def with_stand_in_parameters(model: nn.Module, but: set[nn.Parameter]) -> Iterator[None]:
    """Replace the parameters that are trained, except for some, by others over the same memory.

    The stand-ins have no hooks: a reducer that waits for gradients of the model's own parameters
    does not see those of a step that runs inside. Note [Steps that leave no trace in a reducer].
    """
    own = [
        (tensors, name, tensor)
        for tensors, name, tensor in tensor_slots(model)
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor not in but
    ]
    stand_ins: dict[Tensor, nn.Parameter] = {}
    try:
        for tensors, name, parameter in own:
            if parameter not in stand_ins:
                stand_ins[parameter] = _stand_in(parameter)
            tensors[name] = stand_ins[parameter]
        yield
    finally:
        for tensors, name, parameter in own:
            tensors[name] = parameter


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same class over the same memory, with the same attributes."""
    kind, values = type(parameter), parameter.detach()
    is_plain = issubclass(kind, nn.Parameter) and type(values) is Tensor
    other: nn.Parameter = (
        as_subclass_requiring_grad(kind, values) if is_plain else nn.Parameter(values)
    )
    for name, value in vars(parameter).items():
        vars(other).setdefault(name, value)
    return other
