"""Every public name of torch's module wrappers, on our engines.

    from rekindle.compat.checkpoint_wrapper import checkpoint_wrapper

instead of from `torch.distributed.algorithms._checkpoint.checkpoint_wrapper`. Two private names are
here because other people's code imports them.
"""

from rekindle.modules.wrappers import (
    PREFIX,
    WRAPPED,
    ActivationWrapper,
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)
from rekindle.modules.wrapping import apply_activation_checkpointing

_CHECKPOINT_PREFIX = PREFIX
_CHECKPOINT_WRAPPED_MODULE = WRAPPED

__all__ = [
    "ActivationWrapper",
    "CheckpointImpl",
    "CheckpointWrapper",
    "OffloadWrapper",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "offload_wrapper",
]
