"""Changes that a region makes to Python state, in compiled code: made once, when the forward runs.

A region may append to a list, fill a cache or set an attribute. Dynamo refuses that inside a
checkpointed region by default, because torch's eager engine makes such changes again in backward.
rekindle's eager engine does not, and a graph has no Python in its backward: both make them once.

Dynamo calls the functions while it traces, and takes their results for constants. Where torch does
not have the setting, the graph breaks at such a region.
"""

from rekindle.torch_private.dynamo_tracing import (
    accept_side_effects,
    called_while_tracing,
    functionalizes_rng,
    side_effects_accepted,
    traces_inside_an_op,
)


@called_while_tracing
def may_have_effects() -> bool:
    """Return whether Dynamo can be told to accept such changes in the region that it traces next.

    Not in one that is part of another, or of any higher-order op: Dynamo loses the tensors that
    these changes hand out of both.
    """
    return side_effects_accepted() is not None and not (
        traces_inside_an_op() or functionalizes_rng()
    )


@called_while_tracing
def set_effects_allowed(allowed: bool) -> bool:
    """Have Dynamo accept such changes by the ops for regions that it meets next, or refuse them.

    Dynamo reads the setting once for each op and frame, when it first looks at the op. The setting
    is as before once the frame has been traced, also if that fails.

    Returns:
        The setting before.
    """
    before = bool(side_effects_accepted())
    if before != allowed:
        accept_side_effects(allowed)
    return before
