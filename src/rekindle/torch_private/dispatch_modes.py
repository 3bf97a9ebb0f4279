"""Dispatch modes (`__torch_dispatch__`): which are entered, and how to run past them."""

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_T = TypeVar("_T")

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""The base class of dispatch modes.

Tried on torch 2.11 and 2.13, whose notes on extending torch name it. Goes when it has a public
path."""

is_traceable_wrapper_subclass = _python_dispatch.is_traceable_wrapper_subclass
"""True for a tensor subclass that is made of other tensors.

Tried on torch 2.11 and 2.13. Goes when it has a public path."""

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Number of dispatch modes that are entered.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""

entered_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
"""The dispatch modes that are entered, the innermost last.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""

FAKE = torch._C._TorchDispatchModeKey.FAKE
"""The kind of mode that makes fake tensors, for `entered_mode`. Tried on torch 2.11 and 2.13; goes
when `entered_mode` does."""

PROXY = torch._C._TorchDispatchModeKey.PROXY
"""The kind of mode that makes a graph of what runs, for `entered_mode`. Tried on torch 2.11 and
2.13; goes when `entered_mode` does."""

entered_mode: Callable[[Any], Any] = torch._C._get_dispatch_mode
"""The mode of kind `FAKE` or `PROXY` that is entered, or None.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""


def is_traced() -> bool:
    """True if a graph is being made of what runs: by `torch.compile`, or by `make_fx`.

    Tried on torch 2.11 and 2.13. Goes when a public function answers it for `make_fx` too.
    """
    return entered_mode(PROXY) is not None


below_modes: Callable[[], AbstractContextManager[Any]] = torch._C._DisableTorchDispatch
"""A context that runs ops on plain tensors past every dispatch mode, and takes next to no time.

Tensor subclasses are not looked at either: where there may be some, use `past_modes`. Tried on
torch 2.11 and 2.13. Goes when torch has a public form."""


def unseen(function: Callable[[torch.Tensor], _T], tensor: torch.Tensor) -> _T:
    """Call a function of a tensor past the dispatch modes, if the tensor is a plain one.

    It takes less time than `past_modes`. A tensor of a subclass, and any tensor while a graph is
    traced or tensors are faked, needs its modes. Tried on torch 2.11 and 2.13. Goes when
    `below_modes` does.
    """
    if (
        type(tensor) is not torch.Tensor
        or not dispatch_modes()
        or entered_mode(FAKE) is not None
        or entered_mode(PROXY) is not None
    ):
        return function(tensor)
    with below_modes():
        return function(tensor)


def past_modes(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function of rekindle's own past every dispatch mode, so that none counts its ops.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form that tensor subclasses survive.
    """
    if not dispatch_modes():
        return function(*args)
    modes = entered_modes()
    try:
        _pop_modes(len(modes))
        out = function(*args)
        _set_dispatch_modes(modes)
    except BaseException:
        _set_dispatch_modes(modes)
        raise
    return out


_push_mode = torch._C._push_on_torch_dispatch_stack


def _pop_modes(count: int) -> None:
    tuple(map(torch._C._pop_torch_dispatch_stack, repeat(None, count)))  # Note [In one call]


def _set_dispatch_modes(modes: Sequence[Any]) -> None:
    if [*map(id, entered_modes())] != [*map(id, modes)]:
        _pop_modes(dispatch_modes())
        tuple(map(_push_mode, modes))


_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
_mode_flags = operator.attrgetter(*_MODE_FLAGS)


def dispatch_state() -> tuple[Sequence[Any], tuple[bool, ...]]:
    """The dispatch modes that are entered, and the flags that torch sets for them.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return entered_modes() if dispatch_modes() else (), _mode_flags(_python_dispatch)


def set_dispatch_state(state: tuple[Sequence[Any], tuple[bool, ...]]) -> None:
    """Enter the dispatch modes that were entered when `dispatch_state` was called, and no others.

    Tried on torch 2.11 and 2.13, of which one keeps the last flag a second time. Goes when torch
    has a public form.
    """
    modes, flags = state
    _set_dispatch_modes(modes)
    for name, flag in zip(_MODE_FLAGS, flags, strict=True):
        setattr(_python_dispatch, name, flag)
    set_copy = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
    if set_copy is not None:
        set_copy(flags[-1])


ASKS_DEVICE = torch.ops.prim.device.default
"""The op that a dispatch mode sees when a fake tensor is asked for its device.

Tried on torch 2.11 and 2.13. Goes when modes do not see it."""


@cache
def reads_metadata(op: Any) -> bool:
    """True if an op returns a tensor's sizes, strides, device or the like, and makes no tensor.

    Note [Questions that are no ops]. Whoever asks a tensor subclass for its sizes calls such an op,
    and dispatch modes see it. Autograd asks while it holds the tensor's lock: a mode that then
    reads the tensor's `grad_fn` or `is_leaf` waits for ever. So these are run, and nothing else.

    Tried on torch 2.11 and 2.13. Goes when modes do not see these ops.
    """
    schema = getattr(op, "_schema", None)
    if schema is None or op.namespace not in ("aten", "prim") or schema.is_mutable:
        return False
    returned = [str(each.type) for each in schema.returns]
    if not returned or any("Tensor" in kind for kind in returned):
        return False
    return torch.Tag.data_dependent_output not in op.tags
