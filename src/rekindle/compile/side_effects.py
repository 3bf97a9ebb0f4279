"""Changes that a region makes to Python state, in compiled code: made once, when the forward runs.

A region may append to a list, fill a cache or set an attribute. Dynamo refuses that inside a
checkpointed region by default, because torch's eager engine makes such changes again in backward.
rekindle's eager engine does not, and a graph has no Python in its backward: both make them once.

The functions are called by Dynamo while it traces, as constants. They have no public form; tried on
torch 2.13. Where torch does not have the setting, the graph breaks at such a region.
"""

from typing import Any

_SETTING = "skip_fwd_side_effects_in_bwd_under_checkpoint"


def may_have_effects() -> bool:
    """Return whether Dynamo can be told to accept such changes in the region that it traces next.

    Not in one that is part of another, or of any higher-order op: Dynamo loses the tensors that
    these changes hand out of both.
    """
    from torch._dynamo import config  # noqa: PLC0415 (slow to import)
    from torch._functorch import config as functorch  # noqa: PLC0415

    is_nested = _output().current_tracer.parent is not None
    return hasattr(config, _SETTING) and not (is_nested or functorch.functionalize_rng_ops)


def set_effects_allowed(allowed: bool) -> bool:
    """Have Dynamo accept such changes by the ops for regions that it meets next, or refuse them.

    Dynamo reads the setting once for each op and frame, when it first looks at the op. The setting
    is as before once the frame has been traced, also if that fails.

    Returns:
        The setting before.
    """
    from torch._dynamo import config  # noqa: PLC0415

    before: bool = getattr(config, _SETTING)
    if before != allowed:
        _output().add_cleanup_hook(lambda: setattr(config, _SETTING, before))
        setattr(config, _SETTING, allowed)
    return before


def _output() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415

    return InstructionTranslator.current_tx().output


for _function in (may_have_effects, set_effects_allowed):
    setattr(_function, "_dynamo_marked_constant", True)  # noqa: B010 (mypy knows no such name)
