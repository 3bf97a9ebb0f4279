"""Train models that do not fit in memory, with gradients bit for bit unchanged.

Public are the names in `__all__`, which `dir(rekindle)` shows, and these modules:

    rekindle.policies          values that decide op by op what is kept
    rekindle.strategy          values that say what is done with the activations of a module
    rekindle.testing           `assert_peak`, for tests of a step's memory
    rekindle.integrations.*    transformers, accelerate, peft, Lightning
    rekindle.compat.*          torch's names for checkpoints and wrappers, on rekindle's engines

Every other module is private, whether or not its name begins with an underscore: its names may
change from one version to the next.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from rekindle import policies, strategy
from rekindle._api.checkpoint import checkpoint, checkpoint_sequential
from rekindle._api.losses import linear_cross_entropy, linear_log_probs
from rekindle._api.per_token import linear_per_token
from rekindle._api.selective import create_selective_checkpoint_contexts, name
from rekindle.compat.patch import patch_torch
from rekindle.errors import CheckpointError, OffloadError, RekindleError
from rekindle.modules.applied import Applied
from rekindle.modules.wrappers import (
    ActivationWrapper,
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)
from rekindle.modules.wrapping import apply_activation_checkpointing
from rekindle.observation import Counts, Observation, Traffic, observe
from rekindle.offload.context import Offload, offload
from rekindle.regions.recompute.exec_groups import GraphExecGroup
from rekindle.regions.recompute.reentrant import (
    CheckpointFunction,
    check_backward_validity,
    detach_variable,
)
from rekindle.regions.recompute.rng_state import (
    DefaultDeviceType,
    get_device_states,
    set_device_states,
)
from rekindle.regions.selective.eager_location import SelectiveCheckpointContext
from rekindle.regions.switches import (
    is_recomputing,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)
from rekindle.torch_private.torch_checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    noop_context_fn,
)

if TYPE_CHECKING:  # else imported by `__getattr__`, when first used
    from rekindle._api.on_first_use import (
        BudgetError,
        Device,
        Explanation,
        Frontier,
        Largest,
        Plan,
        Point,
        Profile,
        TriedSize,
        apply,
        explain,
        fit,
        frontier,
        largest,
        plan_of,
        profile,
        remove,
        solve,
    )

__version__ = "0.1.0.dev0"  # the one place that says it

__all__ = [
    "SAC_IGNORED_OPS",
    "ActivationWrapper",
    "Applied",
    "BudgetError",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointImpl",
    "CheckpointPolicy",
    "CheckpointWrapper",
    "Counts",
    "DefaultDeviceType",
    "Device",
    "Explanation",
    "Frontier",
    "GraphExecGroup",
    "Largest",
    "Observation",
    "Offload",
    "OffloadError",
    "OffloadWrapper",
    "Plan",
    "Point",
    "Profile",
    "RekindleError",
    "SelectiveCheckpointContext",
    "Traffic",
    "TriedSize",
    "apply",
    "apply_activation_checkpointing",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "explain",
    "fit",
    "frontier",
    "get_device_states",
    "is_recomputing",
    "largest",
    "linear_cross_entropy",
    "linear_log_probs",
    "linear_per_token",
    "name",
    "noop_context_fn",
    "observe",
    "offload",
    "offload_wrapper",
    "patch_torch",
    "plan_of",
    "policies",
    "profile",
    "remove",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
    "solve",
    "strategy",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


if not TYPE_CHECKING:  # a type checker would take any name for one that this finds

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'rekindle' has no attribute {name!r}")
        value = getattr(import_module("rekindle._api.on_first_use"), name)
        globals()[name] = value
        return value
