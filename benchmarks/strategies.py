"""Strategies that benchmarks compare, each one function of a block and its input.

They differ in whose engine runs the block, in the state that it preserves, and in whether it
recomputes the whole block in backward or keeps the results of matrix products and attention. The
benchmarks of a whole decoder and of the host cost of one region use them.
"""

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec

from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import rekindle
from benchmarks.decoder import RunBlock
from rekindle import policies

Function = Callable[[Tensor], Tensor]


def torch_full(block: Function, x: Tensor) -> Tensor:
    out: Tensor = torch_checkpoint(block, x, use_reentrant=False)
    return out


def torch_no_rng(block: Function, x: Tensor) -> Tensor:
    out: Tensor = torch_checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    return out


def torch_reentrant(block: Function, x: Tensor) -> Tensor:
    out: Tensor = torch_checkpoint(block, x, use_reentrant=True)
    return out


def rekindle_full(block: Function, x: Tensor) -> Tensor:
    out: Tensor = rekindle.checkpoint(block, x)
    return out


def rekindle_no_rng(block: Function, x: Tensor) -> Tensor:
    out: Tensor = rekindle.checkpoint(block, x, preserve_rng_state=False)
    return out


def rekindle_no_check(block: Function, x: Tensor) -> Tensor:
    out: Tensor = rekindle.checkpoint(block, x, determinism_check="none")
    return out


def rekindle_reentrant(block: Function, x: Tensor) -> Tensor:
    out: Tensor = rekindle.checkpoint(block, x, use_reentrant=True)
    return out


def torch_selective(block: Function, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, _keep_compute)
    out: Tensor = torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return out


def torch_every_second(block: Function, x: Tensor) -> Tensor:
    """Attention is kept, and of matrix products the first, the third and so on."""

    def contexts() -> tuple[object, object]:
        seen = {False: 0, True: 0}

        def policy(ctx: SelectiveCheckpointContext, op: object, *_: object, **__: object) -> object:
            seen[ctx.is_recompute] += op in _MATMULS
            if op in _COMPUTE and (op not in _MATMULS or seen[ctx.is_recompute] % 2):
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    out: Tensor = torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return out


def _overloads(ops: Iterable[object]) -> set[object]:
    return {
        getattr(op, name)
        for op in ops
        if isinstance(op, OpOverloadPacket)
        for name in op.overloads()
    }


_MATMULS = _overloads(policies.MATMULS)
_COMPUTE = _MATMULS | _overloads(policies.ATTENTION)


def _keep_compute(_ctx: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    """As people write it for torch."""
    if op in _COMPUTE:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def rekindle_selective(block: Function, x: Tensor) -> Tensor:
    policy = policies.keep_matmuls_and_attention
    out: Tensor = rekindle.checkpoint(block, x, context_fn=policy)
    return out


def rekindle_selective_function(block: Function, x: Tensor) -> Tensor:
    contexts = partial(rekindle.create_selective_checkpoint_contexts, _keep_compute)
    out: Tensor = rekindle.checkpoint(block, x, context_fn=contexts)
    return out


def installed_peers() -> dict[str, RunBlock]:
    """torch_remat, where it is installed: preserves no random state, checks no determinism."""
    if find_spec("torch_remat") is None:
        return {}
    checkpoint = import_module("torch_remat").checkpoint
    return {"torch_remat": lambda block, x: checkpoint()(block)(x)}


TORCH: dict[str, RunBlock] = {
    "torch": torch_full,
    "torch, no RNG": torch_no_rng,
    "torch reentrant": torch_reentrant,
}
TORCH_SELECTIVE = "torch, keep matmuls and attention"
TORCH_EVERY_SECOND = "torch, keep every second matmul"
SELECTIVE: dict[str, RunBlock] = {
    TORCH_SELECTIVE: torch_selective,
    "rekindle, keep matmuls and attention": rekindle_selective,
    "rekindle, the same by a function": rekindle_selective_function,
}
"""These keep part of a block; the others nothing but its input."""
REKINDLE: dict[str, RunBlock] = {
    "rekindle": rekindle_full,
    "rekindle, no RNG": rekindle_no_rng,
    "rekindle, no check": rekindle_no_check,
    "rekindle reentrant": rekindle_reentrant,
}
