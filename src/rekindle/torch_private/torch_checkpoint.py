"""Torch's own checkpoint objects, for when `rekindle.patch_torch()` has put others in their place.

All are read once, at import. `noop_context_fn` and `CheckpointPolicy` are compared by identity
inside torch: there is one of each, and it is torch's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint

torch_module = torch.utils.checkpoint
"""Torch's module. Public; tried on torch 2.11 and 2.13. Goes when torch's early-stop and debug
switches can be read by public functions: see `forced_early_stop`."""

torch_checkpoint = torch_module.checkpoint
"""Torch's own `checkpoint`. Public; tried on torch 2.11 and 2.13. Goes when `patch_torch` does."""

torch_generator: Callable[..., Any] = torch_module._checkpoint_without_reentrant_generator
"""The generator that torch's composable `checkpoint` runs around a module's forward.

Tried on torch 2.11 and 2.13. Goes when that one calls a public function."""

noop_context_fn = torch_module.noop_context_fn
"""The default `context_fn`. Public; tried on torch 2.11 and 2.13. Goes when torch compares it by
another way than identity."""

CheckpointPolicy = torch_module.CheckpointPolicy
"""The answers of a policy. Public; tried on torch 2.11 and 2.13. Goes when torch's partitioner
compares members by another way than identity."""

SAC_IGNORED_OPS = torch_module.SAC_IGNORED_OPS
"""Ops of which selective checkpointing does not ask its policy: they make no activation.

Tried on torch 2.11 and 2.13: no underscore, and not documented. Goes when torch documents it."""

TorchSelectiveContext = torch_module.SelectiveCheckpointContext
"""The context that a policy function is given. Public; tried on torch 2.11 and 2.13. Goes when
`patch_torch` does."""

torch_selective_contexts = torch_module.create_selective_checkpoint_contexts
"""Torch's own `create_selective_checkpoint_contexts`. Public; tried on torch 2.11 and 2.13. Goes
when `patch_torch` does."""

TORCHS_MODES = (torch_module._CachingTorchDispatchMode, torch_module._CachedTorchDispatchMode)
"""The classes of torch's own contexts for a policy.

Tried on torch 2.11 and 2.13. Goes when a policy can be read back from them by a public name."""


def forced_early_stop() -> bool | None:
    """The value that `set_checkpoint_early_stop` forces on every region, or None.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return torch_module._enable_checkpoint_early_stop


def force_early_stop(enable: bool | None) -> None:
    """Set what `forced_early_stop` returns.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form that is no context manager.
    """
    torch_module._enable_checkpoint_early_stop = enable


def forced_debug() -> bool | None:
    """The value that `set_checkpoint_debug_enabled` forces on every region, or None.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return torch_module._checkpoint_debug_enabled


def force_debug(enable: bool | None) -> None:
    """Set what `forced_debug` returns.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form that is no context manager.
    """
    torch_module._checkpoint_debug_enabled = enable


@contextmanager
def watched_torch_checkpoints(see: Callable[[], None]) -> Iterator[None]:
    """Call a function whenever torch's checkpoint, of either kind, runs what it is given.

    Tried on torch 2.11 and 2.13. Goes when torch tells who runs a region.
    """
    generator = torch_module._checkpoint_without_reentrant_generator
    reentrant: Any = torch_module.CheckpointFunction
    forward = reentrant.forward

    def seen_generator(*args: Any, **kwargs: Any) -> Any:
        see()
        return generator(*args, **kwargs)

    def seen_forward(*args: Any, **kwargs: Any) -> Any:
        see()
        return forward(*args, **kwargs)

    torch_module._checkpoint_without_reentrant_generator = seen_generator
    reentrant.forward = staticmethod(seen_forward)
    try:
        yield
    finally:
        torch_module._checkpoint_without_reentrant_generator = generator
        reentrant.forward = staticmethod(forward)
