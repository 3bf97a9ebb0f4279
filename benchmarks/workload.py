"""The step that benchmarks of a whole decoder measure: time, peak, and whether gradients agree.

A strategy is a forward: a function of the decoder and its input. The peak is the allocator's peak,
less the bytes allocated before the forward (parameters, their gradients, the input); gradients
exist before the step and are accumulated into. Memory that was freed but waits for another stream
counts until it can be reused. On a CPU there is no such counter and the model is float32: a smoke
test, for the shape `tiny`.

Gradients are compared with plain eager's bit for bit, in separate steps with deterministic
algorithms on, because attention's usual backward kernel differs from run to run.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.decoder import Decoder, Shape

Forward = Callable[[Any, Tensor], Tensor]
"""Of the decoder and its input."""


def plain(decoder: Any, x: Tensor) -> Tensor:
    """The strategy that does nothing: autograd keeps every activation."""
    out: Tensor = decoder(x)
    return out


class Workload:
    """A decoder with its batch, ready to be stepped: a forward and a backward, no optimizer."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape = shape
        self.device = device
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(0)
        self.decoder: Any = Decoder(shape, device=device, dtype=dtype)
        self.x = shape.hidden_states(device=device, dtype=dtype).requires_grad_()
        self.grad = shape.hidden_states(device=device, dtype=dtype)
        self.leaves: list[Tensor] = [self.x, *self.decoder.parameters()]
        for leaf in self.leaves:
            leaf.grad = torch.zeros_like(leaf)

    def step(self, forward: Forward) -> None:
        forward(self.decoder, self.x).backward(self.grad)

    def gradients(self, forward: Forward) -> list[Tensor]:
        """The gradients of one step, valid until the next."""
        for leaf in self.leaves:
            if leaf.grad is not None:
                leaf.grad.zero_()
        self.step(forward)
        return [leaf.grad for leaf in self.leaves if leaf.grad is not None]

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak(self, forward: Forward) -> int | None:
        """Bytes that one step reaches above what is allocated before it; after a warm-up."""
        if self.device != "cuda":
            return None
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["active_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        self.step(forward)
        torch.cuda.synchronize()
        peak: int = torch.cuda.memory_stats()["active_bytes.all.peak"]
        return peak - before


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class Comparison:
    """Plain eager's gradients, to compare others with."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        with deterministic_algorithms():
            self._expected = [grad.clone() for grad in work.gradients(plain)]

    def is_identical(self, forward: Forward) -> bool:
        """Whether every gradient of a step is that of the first plain step, bit for bit."""
        with deterministic_algorithms():
            return all(map(same_bits, self._work.gradients(forward), self._expected))
