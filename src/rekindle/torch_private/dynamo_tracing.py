"""Questions to Dynamo, and settings of it, while it traces a function."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch._higher_order_ops.wrap import tag_activation_checkpoint

_Function = TypeVar("_Function", bound=Callable[..., Any])

CHECKPOINT_OP = tag_activation_checkpoint
"""The higher-order operator that Dynamo takes torch's `checkpoint` for.

Tried on torch 2.11 and 2.13. Goes when a graph can be given a region by a public name."""


def called_while_tracing(function: _Function) -> _Function:
    """Mark a function that Dynamo calls while it traces, and whose result is a constant to it.

    Tried on torch 2.11 and 2.13. The public form, `torch.compiler.assume_constant_result`, imports
    Dynamo. Goes when it does not.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def without_nested_graph_breaks() -> AbstractContextManager[Any]:
    """A context, for traced code, in which Dynamo's `nested_graph_breaks` is off.

    Tried on torch 2.11 and 2.13. Goes when the setting is read for each function.
    """
    context: AbstractContextManager[Any] = torch._dynamo.patch_dynamo_config(
        nested_graph_breaks=False
    )
    return context


def guard_while_tracing(context_fn: Any, guard: Callable[[Any], None]) -> None:  # noqa: ARG001
    """Have Dynamo call `guard` with its `comptime` context, whose local `context_fn` is this one.

    Tried on torch 2.11 and 2.13. Goes when `torch._dynamo.comptime` has a public path.
    """
    from torch._dynamo.comptime import comptime  # noqa: PLC0415 (slow to import)

    comptime(guard)


def checkpoint_question() -> Callable[[Any], bool] | None:
    """The function by which Dynamo asks whether an object is torch's `checkpoint`, or None.

    Tried on torch 2.11 and 2.13. Goes when `patch_torch` does.
    """
    from torch._dynamo import utils  # noqa: PLC0415 (every optimizer of torch imports it too)

    return getattr(utils, "is_utils_checkpoint", None)


def _frame() -> Any:
    """The graph that Dynamo makes of the frame that it traces."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415

    return InstructionTranslator.current_tx().output


def traces_for_eager_backend() -> bool:
    """True if the graph that is being traced is for the backend `"eager"`, which runs op by op.

    Tried on torch 2.11 and 2.13. Goes when torch preserves random state in regions on that backend.
    """
    from torch._dynamo.backends.debugging import eager  # noqa: PLC0415 (slow to import)

    backend: Any = _frame().compiler_fn
    while backend is not None and backend is not eager:
        around = getattr(backend, "_torchdynamo_orig_backend", None)
        backend = around or getattr(backend, "compiler_fn", None)
    return backend is eager


def traces_inside_an_op() -> bool:
    """True if Dynamo traces the function of a higher-order operator, such as a region.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return _frame().current_tracer.parent is not None


def functionalizes_rng() -> bool:
    """True if graphs hold random states as tensors.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    from torch._functorch import config  # noqa: PLC0415 (slow to import)

    return config.functionalize_rng_ops


_EFFECTS = "skip_fwd_side_effects_in_bwd_under_checkpoint"


def side_effects_accepted() -> bool | None:
    """True if Dynamo accepts changes to Python state in a region; None if torch cannot be told to.

    Tried on torch 2.13, which has the setting, and 2.11, which has not. Goes when it is on by
    default: pytorch/pytorch#124866.
    """
    from torch._dynamo import config  # noqa: PLC0415 (slow to import)

    return getattr(config, _EFFECTS, None)


def accept_side_effects(accepted: bool) -> None:
    """Set what `side_effects_accepted` returns, until the frame that is traced now has been.

    Tried on torch 2.13. Goes when the setting is on by default.
    """
    from torch._dynamo import config  # noqa: PLC0415

    before = getattr(config, _EFFECTS)
    _frame().add_cleanup_hook(lambda: setattr(config, _EFFECTS, before))
    setattr(config, _EFFECTS, accepted)


def last_graph_break() -> tuple[str, str] | None:
    """Where the last graph broke, and why; None if none has.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    for reason in reversed(dynamo.graph_break_reasons if dynamo is not None else []):
        if reason.user_stack:
            line = reason.user_stack[-1]
            place = f'File "{line.filename}", line {line.lineno}, in {line.name}'
            return place, reason.reason.strip().splitlines()[0]
    return None
