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
from rekindle.regions.saved_indices import SavedIndicesEngine
from rekindle.regions.selective.decisions import AS_PLANNED, Decision
from rekindle.regions.selective.eager_location import SelectiveCheckpointContext
from rekindle.strategy import SavedIndices, TierName


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
    moves: bool = False
    """Whether it sends activations elsewhere, and learns from step to step."""
    recorded: bool = False
    """Whether it runs under a policy: what it returns is not to be changed, but by another such."""


def under(policy: Any, **options: Any) -> Mode:
    """A region under a policy."""
    moves = options.pop("moves", False)
    run = functools.partial(rekindle.checkpoint, context_fn=policy, **options)
    return Mode(run, moves=moves, recorded=True)


def offloaded(**options: Any) -> Mode:
    """A region that is offloaded, however small what it saves is."""
    return Mode(inside(lambda: rekindle.offload(**{"min_bytes": 0} | options)), moves=True)


def by_index(strategy: SavedIndices) -> Mode:
    """A region by what autograd saves, as plans have some."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with SavedIndicesEngine(strategy).around(function):
            return function(*args, **kwargs)

    return Mode(run, moves=True)


@dataclass(frozen=True)
class _AsPlanned(policies.Policy):
    """Sends every result elsewhere as soon as it is made, as plans do."""

    tier: TierName

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision:
        return AS_PLANNED[self.tier]


def _of_tier(tier: TierName) -> dict[str, Mode]:
    """The modes that send activations to a tier."""
    away = policies.spill() if tier == "disk" else policies.offload()
    word = "spilled" if tier == "disk" else "offloaded"
    some = tuple(range(1, 1000, 3))
    others = tuple(sorted({*range(1000)} - {*some}))
    return {
        word: offloaded(tier=tier, quota=1.0, derive=False),
        f"{word} or derived": offloaded(tier=tier, quota=0.7),
        f"{word} as is free": offloaded(tier=tier, quota="auto"),
        f"{word} by save": by_index(SavedIndices((), tuple(range(1000)), tier)),
        f"{word} or derived by save": by_index(SavedIndices(others, some, tier)),
        f"some {word}": under(
            policies.every(3, away) | policies.every(2, policies.keep()), moves=True
        ),
        f"some {word} as planned": under(
            policies.every(3, _AsPlanned(tier)) | policies.every(2, policies.keep()), moves=True
        ),
    }


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
    **_of_tier("disk"),
    **(_of_tier("host") if torch.cuda.is_available() else {}),
    "keep everything": under(policies.keep()),
    "keep nothing": under(policies.recompute()),
    "keep matmuls": under(policies.keep_matmuls_and_attention),
    "recompute cheap": under(policies.recompute_cheap, determinism_check="values"),
    "every second": under(policies.every(2, policies.keep())),
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
