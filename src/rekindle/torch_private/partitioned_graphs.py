"""The pairs of graphs, forward and backward, that torch's partitioner makes in a compilation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def in_compilation() -> bool:
    """True if torch compiles something on this thread.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return torch._guards.CompileContext.try_get() is not None


def is_tracing_export() -> bool:
    """True if the trace that is going on is one of `torch.export`.

    Dynamo says so of its own trace alone. Tried on torch 2.11 and 2.13. Goes when torch has a
    public form that is right while Dynamo traces.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415 (slow)

    try:
        return bool(InstructionTranslator.current_tx().output.export)
    except AttributeError:  # no trace of Dynamo's
        return torch.compiler.is_exporting()


def when_compilation_ends(callback: Callable[[Any], None]) -> None:
    """Have `callback` called at the end of every compilation; registered once.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    from torch._dynamo.callback import callback_handler  # noqa: PLC0415 (slow to import)

    if callback not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(callback)


@contextmanager
def pass_over_graph_pairs(run: Callable[[Any, Any, int], None]) -> Iterator[None]:
    """Inside, `run(forward, backward, outputs)` is called with each pair of graphs.

    It is called where torch's own pass for offload is, which is off by default, and before it where
    that is on. Tried on torch 2.11 and 2.13. Goes when torch has a public hook for all backends;
    `torch._inductor.config.custom_partitioner_fn` serves one.
    """
    from torch._functorch import config  # noqa: PLC0415 (slow to import)
    from torch._functorch._activation_offloading import (  # noqa: PLC0415
        activation_offloading as torchs,
    )

    torchs_pass, is_on = torchs.enable_activation_offloading, config.enable_activation_offloading

    def both(forward: Any, backward: Any, outputs: int, *others: Any) -> None:
        run(forward, backward, outputs)
        if is_on:
            torchs_pass(forward, backward, outputs, *others)

    with config.patch(enable_activation_offloading=True):
        torchs.enable_activation_offloading = both  # type: ignore[assignment]
        try:
            yield
        finally:
            torchs.enable_activation_offloading = torchs_pass


INPUT = "input"
"""The name of what a graph is given, in the place of an op's.

Tried on torch 2.11 and 2.13. Goes when `saved_names` does."""


def saved_names(forward: Any, outputs: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names of the ops that make what a forward graph saves, with the shapes of the tensors.

    Args:
        forward: the graph module of the forward, whose results are the model's and the saved ones.
        outputs: how many of the forward's results are the model's.

    Tried on torch 2.11 and 2.13. Goes when torch says what a graph saves.
    """
    (output,) = forward.graph.find_nodes(op="output")
    found = []
    for node in output.args[0][outputs:]:
        val = getattr(node, "meta", {}).get("val")
        if isinstance(val, torch.Tensor):
            shape = tuple(size if isinstance(size, int) else -1 for size in val.shape)
            found.append((_maker(node), shape))
    return tuple(found)


def _maker(node: Any) -> str:
    """The name of the op that made a node's tensor, whatever views are taken of it."""
    if node.op != "call_function":
        return INPUT
    target = node.target
    name = str(target.name()) if hasattr(target, "name") else target.__name__
    if getattr(target, "is_view", False) or name in _LIKE_VIEWS:
        return _maker(node.args[0])
    return name


_LIKE_VIEWS = ("getitem", "aten::_unsafe_view", "aten::detach")
