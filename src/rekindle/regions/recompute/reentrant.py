"""The reentrant variant: forward builds no graph, backward runs the region again and through it.

Kept for code that asks for it by `use_reentrant=True`. It cannot do what its graph-less forward
cannot know: gradients with respect to chosen inputs, tensors inside containers, keyword arguments.
"""

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from rekindle import observation
from rekindle.errors import RekindleError
from rekindle.regions.base import RunningRegion, current, is_replaying, runs_region
from rekindle.regions.recompute import ambient, rng_state
from rekindle.regions.recompute.forward_snapshot import ForwardSnapshot
from rekindle.regions.recompute.inputs import Inputs
from rekindle.regions.recompute.random_generators import DrawWatch
from rekindle.regions.recompute.torch_state import TorchState
from rekindle.torch_private.autograd_graph import runs_whole_graph
from rekindle.torch_private.dynamo_frames import not_compiled
from rekindle.torch_private.grad_mode import set_grad_enabled, without_grad


def detach_variable(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each tensor cut off its graph, as a leaf that wants what it wanted. As torch's function."""
    if not isinstance(inputs, tuple):
        raise RuntimeError(
            f"Only a tuple of tensors can be detached, but got {type(inputs).__name__}"
        )
    return tuple(
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for value in inputs
    )


def check_backward_validity(inputs: Iterable[Any]) -> None:
    """Warn if no input wants a gradient: there would be none at all. As torch's function."""
    if not any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
        warnings.warn(
            "None of the inputs have requires_grad=True. Gradients will be None", stacklevel=2
        )


class CheckpointFunction(torch.autograd.Function):
    """The region as one node: `apply(function, preserve_rng_state, *args)`. As torch's class."""

    @staticmethod
    def forward(
        ctx: Any, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any
    ) -> Any:
        check_backward_validity(args)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        ctx.run_function = run_function
        others = tuple(None if isinstance(arg, Tensor) else arg for arg in args)
        inputs = Inputs(run_function, others, {}, None, keep_graphs=True)
        inputs.devices |= {tensor.device for tensor in tensors if not tensor.is_cpu}
        snapshot = ForwardSnapshot(inputs, run_function, args, {}, preserve_rng_state)
        ctx.snapshot = snapshot
        ctx.count = len(args)
        ctx.positions = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        ctx.save_for_backward(*tensors)
        if observation.active and not is_replaying():
            observation.Watch(run_function).ran(tensors)
        try:
            with nullcontext() if snapshot.sees_all_generators else DrawWatch(snapshot):
                return without_grad(run_function, *args)
        finally:
            snapshot.close(hooked=False)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grads: Any) -> Any:
        if not runs_whole_graph():
            raise RekindleError(
                "A region with use_reentrant=True cannot be used with torch.autograd.grad() or "
                "with backward(inputs=...): its forward built no graph. Call it with "
                "use_reentrant=False, or call backward() without inputs."
            )
        given: list[Any] = [None] * ctx.count
        for position, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
            given[position] = tensor
        inputs = detach_variable(tuple(given))
        outputs = _run_again(ctx, inputs)
        pairs = [
            (out, grad)
            for out, grad in zip(outputs, grads, strict=True)
            if isinstance(out, Tensor) and out.requires_grad
        ]
        if not pairs:
            raise RekindleError(
                "none of output has requires_grad=True, this checkpoint() is not necessary"
            )
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        return None, None, *(v.grad if isinstance(v, Tensor) else None for v in inputs)


def _tensor_or(tensor: Tensor | None, other: Any) -> Any:
    """An argument, which is either a tensor or something else."""
    return other if tensor is None else tensor


@runs_region
def _run_again(ctx: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    snapshot: ForwardSnapshot = ctx.snapshot
    before = TorchState()
    modules = None if snapshot.modules is None else snapshot.modules.now()
    random_now = None if snapshot.rng is None else rng_state.now(snapshot.rng)

    def put_back() -> None:
        if snapshot.modules is not None and modules is not None:
            snapshot.modules.put_back(modules)
        before.put_back()
        if random_now is not None:
            rng_state.restore(random_now)

    try:
        current.set(RunningRegion(None, current.get(), is_replay=True))
        set_grad_enabled(True)
        if snapshot.rng is not None:
            rng_state.restore(snapshot.rng)
        if snapshot.modules is not None:
            snapshot.modules.enter()
        ambient.enter(snapshot.ambient)
        watched = observation.Watch(ctx.run_function).replay if observation.active else nullcontext
        with watched():
            function, args, kwargs = snapshot.inputs.again()
            bound = len(args) - len(inputs)  # what a partial brings with it
            given = map(_tensor_or, inputs, args[bound:])
            outputs = function(*args[:bound], *given, **kwargs)
        put_back()
    except BaseException:  # Note [Put back as often as asked] in torch_state.py
        put_back()
        raise
    return outputs if isinstance(outputs, tuple) else (outputs,)
