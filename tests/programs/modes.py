"""The ways to run a region that are compared with a plain run: one line each in `MODES`."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint as torch_module
from torch import Tensor

import rekindle
import rekindle.compat.checkpoint
from rekindle import policies


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class _Kept(torch.autograd.Function):
    """A reentrant region that keeps its graph instead of replaying.

    What a reentrant region is compared with: gradients of what it shares with its surroundings are
    summed in another order than in a plain run, and so come out with other last bits.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *args: Tensor) -> Any:
        ctx.inputs = [arg.detach().requires_grad_(arg.requires_grad) for arg in args]
        with torch.enable_grad():
            out = function(*ctx.inputs)
        ctx.outputs = out if isinstance(out, tuple) else (out,)
        cut = tuple([x.detach() for x in ctx.outputs])
        return cut if isinstance(out, tuple) else cut[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("not for chosen inputs")
        pairs = [(o, g) for o, g in zip(ctx.outputs, grads, strict=True) if o.requires_grad]
        if not pairs:
            raise RuntimeError("nothing to do")
        for x in ctx.inputs:
            x.grad = None
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs], retain_graph=True)
        return None, *(x.grad for x in ctx.inputs)


def _kept(function: Callable[..., Any], *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return function(*args)
    return _Kept.apply(function, *args)  # type: ignore[no-untyped-call]


def inside(context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Any]:
    """What runs a function inside a context."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return run


@dataclass(frozen=True)
class Mode:
    """One way to run a region, and what its outcome is compared with."""

    run: Callable[..., Any]
    """Called as `run(function, *args, **kwargs)`."""
    reference: Callable[..., Any] = call
    """What the plain run does in its place."""
    reentrant: bool = False
    """Whether it can take no more than a reentrant region can."""


def under(policy: Any, **options: Any) -> Mode:
    """A region under a policy."""
    return Mode(functools.partial(rekindle.checkpoint, context_fn=policy, **options))


MODES: dict[str, Mode] = {
    # To add a mode, add a line: its name, and what to call as `(function, *args, **kwargs)`.
    "default": Mode(rekindle.checkpoint),
    "values": Mode(functools.partial(rekindle.checkpoint, determinism_check="values")),
    "unchecked": Mode(functools.partial(rekindle.checkpoint, determinism_check="none")),
    "to the end": Mode(functools.partial(rekindle.checkpoint, early_stop=False)),
    "debug": Mode(functools.partial(rekindle.checkpoint, debug=True)),
    "contexts": Mode(
        functools.partial(rekindle.checkpoint, context_fn=lambda: (nullcontext(), nullcontext()))
    ),
    "decorated": Mode(lambda function, *args, **kw: rekindle.checkpoint()(function)(*args, **kw)),
    "torch's name": Mode(
        functools.partial(rekindle.compat.checkpoint.checkpoint, use_reentrant=False)
    ),
    "spilled": Mode(
        inside(lambda: rekindle.offload(tier="disk", quota=1.0, min_bytes=0, derive=False))
    ),
    "spilled or derived": Mode(
        inside(lambda: rekindle.offload(tier="disk", quota=0.7, min_bytes=0))
    ),
    "keep everything": under(policies.keep()),
    "keep nothing": under(policies.recompute()),
    "keep matmuls": under(policies.keep_matmuls_and_attention),
    "recompute cheap": under(policies.recompute_cheap, determinism_check="values"),
    "every second": under(policies.every(2, policies.keep())),
    "spill some": under(policies.every(3, policies.spill()) | policies.every(2, policies.keep())),
    "torch's policy": under(
        functools.partial(
            torch_module.create_selective_checkpoint_contexts,
            lambda ctx, op, *args, **kwargs: "mul" in str(op),
        )
    ),
    "reentrant": Mode(
        functools.partial(rekindle.checkpoint, use_reentrant=True), reference=_kept, reentrant=True
    ),
}
