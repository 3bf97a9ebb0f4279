"""Running a function as a region: which engine, by the region's options, and its forward."""

import types
from collections.abc import Callable
from typing import Any

from rekindle import policies
from rekindle.regions.base import Region, run_region
from rekindle.regions.recompute.recompute_region import RecomputeRegion
from rekindle.regions.region_options import Options, contexts_from
from rekindle.regions.selective.policy_contexts import policy_in
from rekindle.regions.selective.selective_region import SelectiveRegion
from rekindle.torch_private.dispatch_modes import is_traced
from rekindle.torch_private.dynamo_frames import no_graph_begins

_LAZY = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def region_for(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Region:
    """The region of one call: recorded op by op if it has a policy, else replayed as a whole."""
    if options.context_fn is None:
        return RecomputeRegion(function, args, kwargs, options)
    if isinstance(options.context_fn, policies.Policy) and not is_traced():
        return SelectiveRegion(options.context_fn, function, args, kwargs, options)
    contexts = contexts_from(options.context_fn)
    policy = policy_in(contexts)
    if policy is None:
        return RecomputeRegion(function, args, kwargs, options, contexts)
    return SelectiveRegion(policies.of(policy), function, args, kwargs, options)


@no_graph_begins
def run_checkpointed(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
) -> Any:
    """Run a function as a region by its options, and return what it returns."""
    out = run_region(region_for(function, args, kwargs, options), function, args, kwargs)
    if type(out) in _LAZY:
        raise TypeError(
            f"{function!r} returns a {type(out).__name__}: it has not run yet, so there is nothing "
            "to checkpoint. Checkpoint the functions that it calls."
        )
    return out
