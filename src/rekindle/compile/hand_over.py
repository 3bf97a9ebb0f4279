"""Inside `torch.compile`, a region is handed to torch's own higher-order op.

Note [Break around]. A region whose function breaks the graph runs outside of graphs, on our engine,
so the graph has to break where `rekindle.checkpoint` is called, not inside. With
`torch._dynamo.config.nested_graph_breaks` it would break in `hand_over`, and ordinary code would go
on from there with torch's operator, which only a graph can run. So `checkpoint` turns that setting
off while Dynamo traces it; frames of the caller break as they are set to. Dynamo may also let
ordinary code go on from the line that turns the setting off: `checkpoint` asks again behind it.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch

from rekindle.compile import traced_policies  # noqa: F401 (it registers itself)
from rekindle.compile.graph_passes import install_passes
from rekindle.compile.graph_rng import runs_op_by_op, with_rng
from rekindle.compile.policy_guards import guard_on_context_fn
from rekindle.compile.side_effects import may_have_effects, set_effects_allowed
from rekindle.torch_private.dynamo_tracing import (
    CHECKPOINT_OP,
    called_while_tracing,
    checkpoint_question,
    guard_while_tracing,
)
from rekindle.torch_private.torch_checkpoint import noop_context_fn, torch_checkpoint


def dynamo_swaps() -> list[tuple[Any, Any]]:
    """Dynamo's question for torch's `checkpoint`, and the one to ask while ours is in its place.

    Dynamo asks whether a function *is* `torch.utils.checkpoint.checkpoint`, and then traces no line
    of it: our function would be taken for torch's operator, and its policies for an error.
    """
    question = checkpoint_question()
    return [] if question is None else [(question, _is_torch_checkpoint)]


def _is_torch_checkpoint(obj: Any) -> bool:
    return obj is torch_checkpoint


@called_while_tracing
def is_exporting() -> bool:
    """True if `torch.export` traces: asked by Dynamo, which in torch 2.11 says yes of itself."""
    return torch.compiler.is_exporting()


def hand_over(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    use_reentrant: bool,
    context_fn: Callable[[], Any],
    preserve_rng_state: bool,
) -> Any:
    """Run a region as torch's own higher-order operator; Dynamo traces this function.

    Checks, debug and early stop are left out: a graph has no replay to check or to stop.
    """
    options: dict[str, Any] = {
        "use_reentrant": use_reentrant,
        "preserve_rng_state": preserve_rng_state,
    }
    if not isinstance(context_fn, FunctionType | partial):  # of which torch's operator takes none
        context_fn = partial(_call, context_fn)
    if context_fn is not noop_context_fn:  # Dynamo cannot read the default through our signature
        guard_while_tracing(context_fn, guard_on_context_fn)
        options["context_fn"] = context_fn
    if preserve_rng_state and runs_op_by_op():
        options["context_fn"] = partial(with_rng, context_fn)
    install_passes()
    if not may_have_effects():
        return torch_checkpoint(function, *args, **options, **kwargs)
    before = set_effects_allowed(True)
    run = CHECKPOINT_OP  # which Dynamo puts in the place of torch's function
    assert run is not None, "Dynamo looks at it here, with that setting"
    set_effects_allowed(before)
    return run(function, *args, **options, **kwargs)


def _call(context_fn: Callable[[], Any]) -> Any:
    return context_fn()


def run_traced(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
) -> Any:
    """Run a region by torch's engine, in a graph that is traced without Dynamo, or after it."""
    return torch_checkpoint(function, *args, **options, **kwargs)
