"""Every public name of `torch.utils.checkpoint`, with torch's defaults and warnings, on our engine.

    from rekindle.compat.checkpoint import checkpoint   # instead of torch.utils.checkpoint

A few private names are here because other people's code imports them.
"""

import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import nn

from rekindle._api import checkpoint as api
from rekindle._api.selective import create_selective_checkpoint_contexts
from rekindle.compile.hand_over import run_traced
from rekindle.errors import CheckpointError
from rekindle.regions.recompute.exec_groups import GraphExecGroup
from rekindle.regions.recompute.reentrant import (
    CheckpointFunction,
    check_backward_validity,
    detach_variable,
)
from rekindle.regions.recompute.rng_state import (
    DefaultDeviceType,
    get_device_states,
    infer_device_type,
    set_device_states,
)
from rekindle.regions.region_options import ContextFn, options_of
from rekindle.regions.run import region_for
from rekindle.regions.selective.eager_location import SelectiveCheckpointContext
from rekindle.regions.selective.policy_contexts import CachedMode, CachingMode
from rekindle.regions.switches import set_checkpoint_debug_enabled, set_checkpoint_early_stop
from rekindle.torch_private.dispatch_modes import is_traced
from rekindle.torch_private.func_transforms import func_transform
from rekindle.torch_private.grad_mode import grad_enabled
from rekindle.torch_private.torch_checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    noop_context_fn,
    torch_generator,
)

_CachedTorchDispatchMode = CachedMode
_CachingTorchDispatchMode = CachingMode
_DEFAULT_DETERMINISM_MODE = "default"
_infer_device_type = infer_device_type

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: Any = _DEFAULT_DETERMINISM_MODE,
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """As torch's: reentrant, with a warning, if `use_reentrant` is not given."""
    if not torch.compiler.is_dynamo_compiling() and is_traced():
        return run_traced(  # called by what comes after Dynamo, for the partitioner
            *(function, args, kwargs),
            use_reentrant=use_reentrant,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
        )
    return api.checkpoint(
        function,
        *args,
        use_reentrant=_explicit(use_reentrant),
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
        **kwargs,
    )


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,  # noqa: A002  (torch's name)
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """As torch's: reentrant, with a warning, if `use_reentrant` is not given."""
    unknown = kwargs.keys() - {"preserve_rng_state"}
    if unknown:
        raise ValueError("Unexpected keyword arguments: " + ",".join(sorted(unknown)))
    return api.checkpoint_sequential(functions, segments, input, _explicit(use_reentrant), **kwargs)


def _explicit(use_reentrant: bool | None) -> bool:
    if use_reentrant is None:
        if torch.compiler.is_compiling():  # where torch does not warn, and a warning ends the graph
            return True
        warnings.warn(
            "checkpoint was called without use_reentrant, which then means use_reentrant=True, as "
            "in torch.utils.checkpoint. Pass use_reentrant=False (recommended) or True.",
            stacklevel=3,
        )
        return True
    return use_reentrant


def _checkpoint_without_reentrant_generator(
    fn: Callable[..., Any],
    preserve_rng_state: bool = True,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: Any = _DEFAULT_DETERMINISM_MODE,
    debug: bool = False,
    early_stop: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Generator[None, None, None]:
    """A region whose forward the caller runs: between the first `next` and the second."""
    # By what comes after Dynamo, for the partitioner; which first runs the region on fake tensors,
    # while nothing makes a graph of it.
    if torch.compiler.is_compiling() or is_traced():
        given = (preserve_rng_state, context_fn, determinism_check, debug, early_stop)
        yield from torch_generator(fn, *given, *args, **kwargs)
        return
    options = options_of(context_fn, determinism_check, debug, early_stop, preserve_rng_state)
    if not grad_enabled() or func_transform() is not None:
        yield
        return
    with region_for(fn, args, kwargs, options):
        yield
