"""Fingerprints of gradients, to compare the gradients of two steps without holding both.

A fingerprint has a checksum of all bits, which depends on where each element is, and a sketch: sums
of the elements with pseudo-random signs, by which the distance of two gradients that differ is
estimated. It is computed where the gradient is, in chunks, with a few MiB of workspace at most.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor

from rekindle.torch_private.dispatch_modes import past_modes

_CHUNK = 1 << 18
"""Elements of one chunk: 2 MiB as int64, a few of which are alive at once."""
_SUMS = 16
"""Sums in a sketch: the distance of two gradients is estimated from as many differences."""
_FIRST, _SECOND, _PLACE = 0x3F58476D1CE4E5B9, 0x14D049BB133111EB, 0x1E3779B97F4A7C15
"""Odd numbers that mix bits (the multipliers of splitmix64, within an int64)."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class GradientFingerprint:
    """A checksum of a gradient's bits, its norm, and a sketch of it."""

    checksum: int
    norm: float
    sums: tuple[float, ...]
    epsilon: float
    """The relative distance of two neighbouring numbers of its dtype."""

    def is_same(self, other: "GradientFingerprint") -> bool:
        """Return whether two gradients are equal in every bit, but for the sign of zeros."""
        return self.checksum == other.checksum

    def distance(self, other: "GradientFingerprint") -> float:
        """Estimate the norm of the difference; 0 if both have elements that are not finite."""
        total = sum((a - b) ** 2 for a, b in zip(self.sums, other.sums, strict=True))
        if isfinite(total):
            return sqrt(total)
        return float("inf") if isfinite(sum(self.sums)) or isfinite(sum(other.sums)) else 0.0


GradientFingerprints = dict[Any, GradientFingerprint]
"""Fingerprints of a step's gradients: by the parameter's name, or by the leaf outside the model."""


class FingerprintCollector:
    """Computes the fingerprints of gradients as they come; sparse ones are left out."""

    def __init__(self) -> None:
        self._partial: dict[Any, tuple[Tensor, Tensor, float]] = {}

    def add(self, key: Any, gradient: Tensor) -> None:
        """Compute the fingerprint of a gradient, or add a part of one that comes in parts."""
        past_modes(self._add, key, gradient)  # what this runs is no op of the step's

    def _add(self, key: Any, gradient: Tensor) -> None:
        parts = list(_plain_tensors(gradient.detach()))
        if not parts:
            return
        checksum, numbers, epsilon = _fingerprint(parts)
        if key in self._partial:
            before = self._partial[key]
            checksum, numbers = checksum + _mix(before[0].clone()), numbers + before[1]
        self._partial[key] = checksum, numbers, epsilon

    def __contains__(self, key: Any) -> bool:
        return key in self._partial

    def read(self) -> GradientFingerprints:
        """Return the fingerprints by their keys; waits for the device."""
        return {key: _read(*parts) for key, parts in self._partial.items()}


def differing_keys(left: GradientFingerprints, right: GradientFingerprints) -> list[Any]:
    """Return the keys that both have, and whose gradients differ."""
    return [key for key, each in left.items() if key in right and not each.is_same(right[key])]


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a gradient consists of, on this rank."""
    if hasattr(tensor, "to_local"):  # a DTensor
        yield from _plain_tensors(tensor.to_local())
    elif hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain_tensors(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _fingerprint(parts: Iterable[Tensor]) -> tuple[Tensor, Tensor, float]:
    """A checksum, and the square of the norm with the sums of a sketch, still on the device."""
    checksum: Any = 0
    numbers: Any = 0.0
    epsilon, place = 0.0, 0
    with torch.no_grad():
        for part in parts:
            if part.is_floating_point():
                epsilon = max(epsilon, torch.finfo(part.dtype).eps)
            for chunk in part.reshape(-1).split(_CHUNK):
                bits, sketch = _fingerprint_chunk(chunk, place)
                checksum, numbers = checksum + bits, numbers + sketch
                place += chunk.numel()
    if place == 0:
        return torch.zeros((), dtype=torch.int64), torch.zeros(1 + _SUMS), epsilon
    return checksum, numbers, epsilon


def _fingerprint_chunk(values: Tensor, place: int) -> tuple[Tensor, Tensor]:
    if values.is_floating_point() and values.element_size() > 1:  # float8 has no sums
        values = values + 0.0  # -0.0 is 0.0: what is added to zeros has no other
    mixed = torch.arange(place, place + len(values), device=values.device)
    _mix(mixed.add_(1).mul_(_PLACE))
    signs = (mixed & 1).mul_(2).sub_(1).double()
    mixed.add_(values.view(_INTEGERS[values.element_size()]))
    checksum = _mix(mixed).sum()
    del mixed
    numbers = values.double()
    square = numbers.square().sum().reshape(1)
    signed = torch.nn.functional.pad(signs.mul_(numbers), (0, -len(values) % _SUMS))
    return checksum, torch.cat([square, signed.view(-1, _SUMS).sum(0)])


def _mix(numbers: Tensor) -> Tensor:
    """Spread the bits of numbers, in place: two that differ in one bit differ in about half."""
    numbers.bitwise_xor_(numbers >> 30).mul_(_FIRST)
    numbers.bitwise_xor_(numbers >> 27).mul_(_SECOND)
    return numbers.bitwise_xor_(numbers >> 31)


def _read(checksum: Tensor, numbers: Tensor, epsilon: float) -> GradientFingerprint:
    square, *sums = numbers.tolist()
    return GradientFingerprint(int(checksum.item()), sqrt(square), tuple(sums), epsilon)
