"""Context managers that restore a model's state after it was measured."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.module_attachment import resume, suspend
from rekindle.modules.apply_strategies import undo
from rekindle.modules.caches import no_caches
from rekindle.modules.compiled_blocks import restore_opened, snapshot_opened
from rekindle.modules.forward import Forward, forward_of
from rekindle.planner.instruments.model_lock import planning_lock
from rekindle.planner.measure.restore_attributes import restore_attributes
from rekindle.planner.measure.stand_in_parameters import with_stand_in_parameters
from rekindle.planner.placement import compute_device
from rekindle.planner.trace.fake_tensors import is_without_memory
from rekindle.planner.training_step import TrainingStep
from rekindle.regions.recompute.reachable_state import generators_of
from rekindle.torch_private.ddp import reducers_idle
from rekindle.torch_private.fsdp import sharded_gradients_set_aside, sharded_parameters
from rekindle.torch_private.process_groups import in_process_group
from rekindle.torch_private.set_aside import gradient_set_aside

Rewind = Callable[[], None]
OnGradient = Callable[[str, Tensor], None]


@contextmanager
def preserve_model_state(
    model: nn.Module, on_gradient: OnGradient | None = None
) -> Iterator[Rewind]:
    """Restore gradients, buffers, attributes, strategies and random states at the end.

    Meanwhile a plan that is applied to the model is off, and no cache of keys and values is kept.
    Yields a function that restores the random states at once, so that a step can be run again with
    the same draws.

    Each part is restored even if another one fails. `on_gradient` is called with each gradient
    before it is freed; gradients that are not freed are for the caller to read.
    """
    with planning_lock(model), ExitStack() as stack:
        stack.callback(resume, suspend(model))
        stack.callback(_restore_forwards, {m: forward_of(m) for m in model.modules()})
        stack.callback(restore_opened, model, snapshot_opened(model))
        stack.callback(undo, model)
        stack.enter_context(_restore_buffers(model))
        stack.enter_context(_restore_gradients(model, on_gradient))
        rewind = stack.enter_context(_restore_random_states(model))
        stack.enter_context(no_caches(model))
        stack.enter_context(restore_attributes(model))
        yield rewind


@contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers and attributes after warm-up steps: the next step begins as the first did.

    Gradients add up, and what offload learns from step to step stays.
    """
    with _restore_buffers(model), restore_attributes(model):
        yield


@contextmanager
def repeatable(step: TrainingStep) -> Iterator[None]:
    """Give every run of a step the same random numbers; restore the model's state at the end."""
    with (
        preserve_model_state(step.model, step.on_gradient) as rewind,
        step.restoring_outside_gradients(),
    ):
        step.before_each, step.is_first = rewind, True
        try:
            yield
        finally:
            step.before_each, step.is_first = None, False


def _restore_forwards(forwards: dict[nn.Module, Forward | None]) -> None:
    for module, forward in forwards.items():
        if forward is not None:
            vars(module)["forward"] = forward
            forward.is_on = True


@contextmanager
def _restore_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers from copies in host memory: a device that is full has no room for them."""
    before = {
        b: b.detach().to("cpu", copy=True) for b in model.buffers() if not is_without_memory(b)
    }
    places = {module: dict(module._buffers) for module in model.modules()}
    try:
        yield
    finally:
        for module, own in places.items():
            if dict(module._buffers) != own:
                module._buffers.clear()
                module._buffers.update(own)
        with torch.no_grad():
            for buffer, values in before.items():
                if not torch.equal(buffer.detach().to("cpu"), values):
                    buffer.copy_(values)  # else a graph that uses it stays valid


@contextmanager
def _restore_gradients(model: nn.Module, on_gradient: OnGradient | None) -> Iterator[None]:
    """Set gradients aside, and free those that a step makes as soon as they are complete.

    So measuring needs no second set of gradients, except for shards: what reduces these looks for
    them later. Nothing writes to a gradient that is set aside: Note [Steps that leave no trace in a
    reducer].
    """
    with ExitStack() as stack:
        stack.enter_context(reducers_idle(model))
        stack.enter_context(sharded_gradients_set_aside(model))
        for parameter in model.parameters():
            stack.enter_context(gradient_set_aside(parameter))
        sharded = sharded_parameters(model)
        if in_process_group():
            stack.enter_context(with_stand_in_parameters(model, but=sharded))
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter in sharded:
                parameter.grad = torch.zeros_like(parameter)
            else:
                free = partial(_free_gradient, name, on_gradient)
                stack.callback(parameter.register_post_accumulate_grad_hook(free).remove)
        yield


def _free_gradient(name: str, on_gradient: OnGradient | None, parameter: Tensor) -> None:
    if on_gradient is not None and parameter.grad is not None:
        on_gradient(name, parameter.grad)
    parameter.grad = None


@contextmanager
def _restore_random_states(model: nn.Module) -> Iterator[Rewind]:
    """Restore the random states of torch, of Python, and of numpy where it is in use.

    Torch's are those of the CPU, of the model's devices and of generators that the model holds.
    """
    places = {p.device for p in model.parameters()} | {compute_device(model)}
    devices = sorted({device.index or 0 for device in places if device.type == "cuda"})
    numpy: Any = sys.modules.get("numpy")
    cpu, cuda = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
    generators = [(generator, generator.get_state()) for generator in generators_of(model)]
    own, numpys = random.getstate(), None if numpy is None else numpy.random.get_state()

    def rewind() -> None:
        torch.set_rng_state(cpu)
        for device, state in zip(devices, cuda, strict=True):
            torch.cuda.set_rng_state(state, device)
        for generator, state in generators:
            generator.set_state(state)
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(numpys)

    try:
        yield rewind
    finally:
        rewind()
