"""A model that is measured ends as it was."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.module_attachment import put_back, set_aside
from rekindle.modules.apply_strategies import undo
from rekindle.modules.caches import no_caches
from rekindle.modules.forward import Forward, forward_of
from rekindle.planner.measure.model_lock import turn_of
from rekindle.planner.measure.restore_attributes import notes_put_back
from rekindle.planner.measure.stand_in_parameters import on_stand_ins
from rekindle.planner.placement import compute_device
from rekindle.planner.trace.fake_tensors import has_no_memory
from rekindle.planner.training_step import Step
from rekindle.regions.recompute.reachable_state import generators_of
from rekindle.torch_private.data_parallel import (
    gradient_set_aside,
    reducers_idle,
    sharded_gradients_set_aside,
    sharded_parameters,
)
from rekindle.torch_private.process_groups import in_process_group

Rewind = Callable[[], None]
OnGradient = Callable[[str, Tensor], None]


@contextmanager
def untouched(model: nn.Module, on_gradient: OnGradient | None = None) -> Iterator[Rewind]:
    """Whatever runs inside: gradients, buffers, strategies and random states end as they were.

    So does what modules note. A plan that stands on the model says nothing meanwhile, and no cache
    of keys and values is kept. Gives a function that puts the random states back to where they are
    now, so that a step can be run again with the same draws.

    Each part is put back whatever becomes of the others. `on_gradient` is shown each gradient
    before it is let go of; those that stay are for the caller to look at.
    """
    with turn_of(model), ExitStack() as stack:
        stack.callback(put_back, set_aside(model))
        stack.callback(_put_back_forwards, {m: forward_of(m) for m in model.modules()})
        stack.callback(undo, model)
        stack.enter_context(_buffers_put_back(model))
        stack.enter_context(_gradients_put_back(model, on_gradient))
        rewind = stack.enter_context(_random_states_put_back(model))
        stack.enter_context(no_caches(model))
        stack.enter_context(notes_put_back(model))
        yield rewind


@contextmanager
def rewound(model: nn.Module) -> Iterator[None]:
    """Steps inside leave buffers and notes as they were: the next one is the first.

    Gradients add up, and whatever learns from step to step keeps what it has learnt.
    """
    with _buffers_put_back(model), notes_put_back(model):
        yield


@contextmanager
def repeatable(step: Step) -> Iterator[None]:
    """Inside, every run of a step draws the same random numbers; the model ends as it was."""
    with untouched(step.model, step.see_gradient) as rewind, step.leaving_no_gradients():
        step.before_each, step.is_first = rewind, True
        try:
            yield
        finally:
            step.before_each, step.is_first = None, False


def _put_back_forwards(forwards: dict[nn.Module, Forward | None]) -> None:
    for module, forward in forwards.items():
        if forward is not None:
            vars(module)["forward"] = forward
            forward.is_on = True


@contextmanager
def _buffers_put_back(model: nn.Module) -> Iterator[None]:
    """Copies wait in host memory: a device that is full has no room for them."""
    before = {b: b.detach().to("cpu", copy=True) for b in model.buffers() if not has_no_memory(b)}
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
def _gradients_put_back(model: nn.Module, on_gradient: OnGradient | None) -> Iterator[None]:
    """Gradients that a step makes are let go of as soon as they are there; those of before stay.

    So measuring needs no second set of them, except for shards: what reduces these looks for them
    later. A gradient of before is not written to: Note [Steps that leave no trace in a reducer].
    """
    with ExitStack() as stack:
        stack.enter_context(reducers_idle(model))
        stack.enter_context(sharded_gradients_set_aside(model))
        for parameter in model.parameters():
            stack.enter_context(gradient_set_aside(parameter))
        sharded = sharded_parameters(model)
        if in_process_group():
            stack.enter_context(on_stand_ins(model, but=sharded))
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter in sharded:
                parameter.grad = torch.zeros_like(parameter)
            else:
                let_go = partial(_let_go, name, on_gradient)
                stack.callback(parameter.register_post_accumulate_grad_hook(let_go).remove)
        yield


def _let_go(name: str, on_gradient: OnGradient | None, parameter: Tensor) -> None:
    if on_gradient is not None and parameter.grad is not None:
        on_gradient(name, parameter.grad)
    parameter.grad = None


@contextmanager
def _random_states_put_back(model: nn.Module) -> Iterator[Rewind]:
    """Of torch, for the CPU, the model's devices and the generators that the model holds.

    And of Python, and of numpy where it is in use.
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
