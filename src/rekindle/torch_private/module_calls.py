"""The code that calls a module, by which a module that runs is found on Python's stack."""

from types import CodeType
from typing import Any

import torch.nn.modules.module as _modules
from torch import nn

MODULE_CALL_METHODS = ("__call__", "_call_impl", "_wrapped_call_impl")
"""The names of the methods by which a module is called.

Tried on torch 2.11 and 2.13. Goes when a bound method of them says whose forward it runs."""

MODULE_CALL: CodeType = nn.Module._call_impl.__code__
"""The code that calls a module's forward; its local `self` is the module.

Tried on torch 2.11 and 2.13. Goes when torch says which modules are being called."""

MODULE_CALL_WITH_HOOKS: CodeType = next(
    (c for c in MODULE_CALL.co_consts if isinstance(c, CodeType) and c.co_name == "inner"),
    MODULE_CALL,
)
"""The code that calls a module which has hooks of any kind.

Tried on torch 2.11 and 2.13. Goes when `always_call` hooks run on a `BaseException` too."""

GLOBAL_ALWAYS_CALLED: dict[int, bool] = getattr(_modules, "_global_forward_hooks_always_called", {})
"""Forward hooks of all modules that are called even on an error, by their ids.

Tried on torch 2.11 and 2.13. Goes when `MODULE_CALL_WITH_HOOKS` does."""


def has_always_called_hooks(module: object) -> bool:
    """True if a module has forward hooks that are called even on an error.

    Tried on torch 2.11 and 2.13. Goes when `MODULE_CALL_WITH_HOOKS` does.
    """
    return bool(GLOBAL_ALWAYS_CALLED or getattr(module, "_forward_hooks_always_called", None))


def rnn_weights(rnn: nn.RNNBase) -> list[Any]:
    """The list in which a recurrent module holds its weights a second time, in its kernel's order.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    weights: list[Any] = rnn._flat_weights
    return weights


_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


def forward_hooks(module: nn.Module) -> list[dict[int, Any]]:
    """The dicts in which a module holds its forward hooks, by the ids of their handles.

    Tried on torch 2.11 and 2.13. Goes when torch can list the hooks of a module.
    """
    return [vars(module)[name] for name in _HOOKS if vars(module).get(name) is not None]
