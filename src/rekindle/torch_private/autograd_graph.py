"""Autograd's graph and the backward that runs on this thread."""

from collections.abc import Callable
from operator import attrgetter
from types import CodeType
from typing import Any

import torch

_autograd = torch._C._autograd
_engine = torch.autograd.Variable._execution_engine

nodes_so_far: Callable[[], int] = _autograd._get_sequence_nr
"""Number of ops that autograd has recorded on this thread.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""

keep_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph
"""True if the backward that runs was called with `retain_graph=True`.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward that runs on this thread, or -1.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node whose backward runs on this thread, or None.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""

exec_group: Callable[[], Any] = torch._C._get_graph_exec_group
"""The exec group (`torch.utils.checkpoint.GraphExecGroup`) that is entered, also on autograd's own
threads.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""

set_exec_group: Callable[[Any], None] = torch._C._set_graph_exec_group
"""Enters an exec group, or leaves it with None.

Tried on torch 2.11 and 2.13. Goes when torch's `GraphExecGroup` can be entered a second time."""

runs_whole_graph: Callable[[], bool] = _engine.is_checkpoint_valid
"""True if the backward that runs was called without chosen inputs.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that runs on this thread ends.

    Tried on torch 2.11 and 2.13. Goes when the oldest torch that is supported has the public form
    that pytorch/pytorch#66199 asks for.
    """
    _engine.queue_callback(callback)


def grad_fn_of(tensor: torch.Tensor) -> Any:
    """The node that made a tensor, or None; also where autograd refuses to read a view's `grad_fn`.

    Tried on torch 2.11 and 2.13: after an in-place write to one of several views of one op, reading
    `grad_fn` raises. Goes when it does not.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def saved_by(node: Any, name: str) -> Any:
    """The packed form of a node's saved tensor `name`, as saved-tensor hooks returned it, or None.

    Tried on torch 2.11 and 2.13. The documented attribute, `node._saved_<name>`, unpacks it. Goes
    when `node._raw_saved_<name>` is documented for built-in nodes.
    """
    try:
        return getattr(node, f"_raw_saved_{name}").data
    except RuntimeError:  # a backward has freed it
        return None


def sequence_number(node: Any) -> int:
    """A node's place among the ops that autograd has recorded on its thread: see `nodes_so_far`.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    number: int = node._sequence_nr()
    return number


tensor_hooks: Callable[[torch.Tensor], Any] = attrgetter("_backward_hooks")
"""The hooks that `tensor.register_hook` has put on a tensor, by their ids; None without any.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""

is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view
"""True if autograd takes a tensor for a view of another.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""


def function_class(context: Any) -> Any:
    """The `autograd.Function` whose node, or whose context, this is; None for any other object.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return getattr(context, "_forward_cls", None)


def runs_compiled_graph(function: Any) -> bool:
    """True if an `autograd.Function` runs a graph that torch compiled.

    Tried on torch 2.11 and 2.13: such classes have an attribute of that name. Goes when torch has a
    public form.
    """
    return hasattr(function, "compiled_fw")


FUNCTION_APPLY: CodeType | None = getattr(
    getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None
)
"""The code that runs an `autograd.Function`, in which its class is a local; None where it is C.

Where there is none, a region holds what compiled code saves for backward. Tried on torch 2.11 and
2.13. Goes when saved-tensor hooks are told which node saves."""


def has_accumulation_hooks(parameter: torch.Tensor) -> bool:
    """True if a parameter has hooks that run when its gradient has been accumulated.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
