"""Runs models without the cache of keys and values that those of transformers keep.

In training nothing reads the cache, and it would hold the keys and values of every layer until
backward. Where it is on all the same, replays are right: Note [Objects among the arguments] in
regions/recompute/object_state.py.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


def forbid_cache(module: nn.Module, always: bool = False) -> RemovableHandle | None:
    """Have a module called with `use_cache=False` while it trains; None if it takes no such thing.

    Args:
        module: the module.
        always: in evaluation too.
    """
    names = _parameters(type(module))
    if "use_cache" not in names:
        return None
    hook = partial(_without_cache, names.index("use_cache") - 1, always)  # less self
    return module.register_forward_pre_hook(hook, with_kwargs=True)


def _parameters(kind: type[nn.Module]) -> list[str]:
    try:
        return list(inspect.signature(kind.forward).parameters)
    except (AttributeError, TypeError, ValueError):  # a scripted module has no signature
        return []


def _without_cache(
    position: int, always: bool, module: nn.Module, args: Any, kwargs: Any = None
) -> Any:
    # Without keyword arguments: another thread took the hook off after this call had begun.
    if not (module.training or always) or kwargs is None:
        return None
    if len(args) > position:
        return (*args[:position], False, *args[position + 1 :]), kwargs
    return args, {**kwargs, "use_cache": False}


@contextmanager
def no_caches(model: nn.Module) -> Iterator[None]:
    """Context in which no module of a model keeps a cache."""
    with ExitStack() as stack:
        for module in model.modules():
            handle = forbid_cache(module, always=True)
            if handle is not None:
                stack.callback(handle.remove)
        yield
