"""Which of our functions `torch.compile` may not take for the beginning of a graph.

A function that a compiled one calls is traced as part of it. After a graph break it is called from
ordinary code, and the compiler would make a graph of what it can of it, in which
`torch.compiler.is_compiling()` is true and no region is one: what is done there to saved-tensor
hooks and to random state is no matter of graphs.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])

_action = eval_frame._FrameAction
_strategy = eval_frame._FrameExecStrategy


def no_graph_begins(function: _Function) -> _Function:
    """The function, which runs as it is unless it is traced in another.

    As `torch.compiler.disable`, but that it costs nothing at run time, does not import the
    compiler, and lets a function be traced where it is called in compiled code. No public form;
    tried on torch 2.11 and 2.13.
    """
    eval_frame.set_code_exec_strategy(function.__code__, _strategy(_action.SKIP, _action.DEFAULT))
    return function


def no_graph_inside(function: _Function) -> _Function:
    """The same, and neither is what the function calls compiled."""
    eval_frame.set_code_exec_strategy(function.__code__, _strategy(_action.SKIP, _action.SKIP))
    return function


def not_compiled(function: _Function) -> _Function:
    """The function, for autograd to call as a hook: it runs as it is, and so does what it calls.

    Compiled autograd calls the hooks of saved tensors from compiled code, which the compiler would
    trace into. As `torch.compiler.disable`, but that it costs nothing at run time and does not
    import the compiler. No public form; tried on torch 2.11 and 2.13.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return no_graph_inside(function)


def called_outside_graphs(why: str) -> Callable[[_Function], _Function]:
    """A decorator: a call of the function ends a graph where the call is, and the error says why.

    As `torch.compiler.disable(reason=why)`, but that it costs nothing at run time and does not
    import the compiler. No public form; tried on torch 2.11 and 2.13.
    """

    def mark(function: _Function) -> _Function:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
        return no_graph_inside(function)

    return mark


within_compiled_code: Callable[[], Any] = eval_frame.get_eval_frame_callback
"""Whether compiled code has called what runs here, which is itself not compiled: None if not. No
public form; tried on torch 2.11 and 2.13."""


def break_graph(why: str) -> None:
    """End the graph that is being traced here; an error that says why under `fullgraph=True`."""
    torch._dynamo.graph_break(msg=why)
