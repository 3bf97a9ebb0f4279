"""A model that is measured ends as it was."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rekindle.attachment import put_back, set_aside
from rekindle.budget.fake import has_no_memory
from rekindle.budget.noted import notes_put_back
from rekindle.modules.application import undo
from rekindle.modules.caches import no_caches
from rekindle.modules.forward import forward_of


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside: gradients, buffers, fates and the random state end as they were.

    So does what modules note. A plan that stands on the model says nothing meanwhile, and no cache
    of keys and values is kept.
    """
    aside = set_aside(model)
    gradients = {p: p.grad for p in model.parameters()}
    buffers = {b: b.detach().clone() for b in model.buffers() if not has_no_memory(b)}
    places = {module: dict(module._buffers) for module in model.modules()}
    fates = {module: forward_of(module) for module in model.modules()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    try:
        with (
            torch.random.fork_rng(devices),
            _other_random_state(),
            no_caches(model),
            notes_put_back(model),
        ):
            for parameter in gradients:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            yield
    finally:
        undo(model)
        for module, forward in fates.items():
            if forward is not None:
                vars(module)["forward"] = forward
                forward.is_on = True
        put_back(aside)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for module, own in places.items():
            module._buffers.clear()
            module._buffers.update(own)
        with torch.no_grad():
            for buffer, before in buffers.items():
                if not torch.equal(buffer, before):  # else a graph that uses it stays valid
                    buffer.copy_(before)


@contextmanager
def _other_random_state() -> Iterator[None]:
    """The random state of Python, and of numpy where it is in use, ends as it was."""
    numpy = sys.modules.get("numpy")
    before, there = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(there)
