"""Models without their wrappers: plans go by modules, whatever wraps them.

`DistributedDataParallel`, `DataParallel`, `torch.compile` and FSDP1 put a module around another;
the path of the inner one then has a part that the model itself knows nothing of. `fully_shard` and
`replicate` wrap nothing, but give a module a new class that is named after the old one.
"""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

_Value = TypeVar("_Value")
_INNER = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
"""By the class of a wrapper of torch's: the name of the module inside of it. By names, because an
import of the classes would import all that they need."""


def _inner_name(module: nn.Module) -> str | None:
    """The name of the one module that a wrapper wraps; None for a module that is no wrapper."""
    for kind in type(module).__mro__:
        name = _INNER.get(kind.__name__)
        if name is not None and kind.__module__.startswith("torch."):
            return name if isinstance(module._modules.get(name), nn.Module) else None
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of wrappers; the module itself without any.

    >>> unwrapped(nn.DataParallel(nn.Linear(2, 2)))
    Linear(in_features=2, out_features=2, bias=True)
    """
    while (name := _inner_name(module)) is not None:
        inner = module._modules[name]
        assert inner is not None, "it has a name"
        module = inner
    return module


def class_name(module: nn.Module) -> str:
    """The name of a module's class, inside of wrappers, as it was before `fully_shard`."""
    kind = type(unwrapped(module))
    while len(kind.__bases__) == 2 and _is_added(kind.__bases__[0]):
        kind = kind.__bases__[1]
    return kind.__name__


def _is_added(base: type) -> bool:
    """Returns whether `fully_shard` or `replicate` put this base class before a module's own."""
    return base.__module__.startswith("torch.distributed.") and not issubclass(base, nn.Module)


def places(model: nn.Module) -> dict[str, str]:
    """The path of each module of a model, by its path without wrappers.

    >>> places(nn.DataParallel(nn.Sequential(nn.ReLU())))
    {'': 'module', '0': 'module.0'}
    """
    found: dict[str, str] = {}
    plain: dict[str, str] = {}
    """By the path of a module: its path without wrappers."""
    inner: dict[str, str | None] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        outer, _, name = path.rpartition(".")
        if not path:
            plain[path] = ""
        elif inner[outer] == name:
            plain[path] = plain[outer]
        else:
            plain[path] = f"{plain[outer]}.{name}" if plain[outer] else name
        inner[path] = _inner_name(module)
        found[plain[path]] = path  # the innermost one comes last
    return found


def in_places(model: nn.Module, values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Values by paths without wrappers, such as strategies, by the paths that a model has."""
    where = places(model)
    return {where[path]: value for path, value in values.items()}
