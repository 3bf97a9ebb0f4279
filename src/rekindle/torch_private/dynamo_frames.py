"""Which of our functions `torch.compile` may not take for the beginning of a graph.

A function that a compiled one calls is traced as part of it. After a graph break it is called from
ordinary code, and the compiler would make a graph of what it can of it, in which
`torch.compiler.is_compiling()` is true and no region is one: what is done there to saved-tensor
hooks and to random state is no matter of graphs.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])

_action = eval_frame._FrameAction
_strategy = eval_frame._FrameExecStrategy


def no_graph_begins(function: _Function) -> _Function:
    """Mark a function that runs uncompiled unless it is traced as part of another.

    As `torch.compiler.disable`, but that it costs nothing at run time, does not import the
    compiler, and lets a function be traced where it is called in compiled code. Tried on torch 2.11
    and 2.13. Goes when torch has a public form.
    """
    eval_frame.set_code_exec_strategy(function.__code__, _strategy(_action.SKIP, _action.DEFAULT))
    return function


def no_graph_inside(function: _Function) -> _Function:
    """Mark a function that runs uncompiled with all that it calls, unless it is traced in another.

    Tried on torch 2.11 and 2.13. Goes when `no_graph_begins` does.
    """
    eval_frame.set_code_exec_strategy(function.__code__, _strategy(_action.SKIP, _action.SKIP))
    return function


def not_compiled(function: _Function) -> _Function:
    """Mark a hook for autograd to call, which runs uncompiled with all that it calls.

    Compiled autograd calls the hooks of saved tensors from compiled code, which the compiler would
    trace into. As `torch.compiler.disable`, but that it costs nothing at run time and does not
    import the compiler. Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return no_graph_inside(function)


def called_outside_graphs(why: str) -> Callable[[_Function], _Function]:
    """A decorator: a call of the function ends a graph where the call is, and the error says why.

    As `torch.compiler.disable(reason=why)`, but that it costs nothing at run time and does not
    import the compiler. Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """

    def mark(function: _Function) -> _Function:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
        return no_graph_inside(function)

    return mark


within_compiled_code: Callable[[], Any] = eval_frame.get_eval_frame_callback
"""Not None if compiled code has called what runs here, which is itself not compiled.

Tried on torch 2.11 and 2.13. Goes when torch has a public form."""


def is_compiled(module: nn.Module) -> bool:
    """True if a module is compiled: as a whole, by `module.compile()`, or by its forward.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    own = vars(module)
    if own.get("_compiled_call_impl") is not None:
        return True
    return hasattr(own.get("forward"), "_torchdynamo_orig_callable")


def break_graph(why: str) -> None:
    """End the graph that is being traced here; an error that says why under `fullgraph=True`.

    Tried on torch 2.11 and 2.13. Goes when torch documents `torch._dynamo.graph_break` under a
    public path.
    """
    torch._dynamo.graph_break(msg=why)
