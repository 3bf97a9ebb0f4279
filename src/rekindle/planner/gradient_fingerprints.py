"""Fingerprints of gradients, to compare the gradients of two steps without holding both.

A fingerprint has a checksum of all bits, which depends on where each element is, and a sketch: sums
of the elements with pseudo-random signs, by which the distance of two gradients that differ is
estimated. Both are computed on the gradient's device, in workspace of a fixed size.

Note [Few ops per gradient]. On a fast GPU an op costs more on the host than a small gradient costs
on the device. So small gradients are copied, as they come, into rows of one tensor, and a few ops
reduce many rows at once; large ones are reduced in pieces that are as large as the workspace. What
is random is computed once per collector, and what is left of a piece, some dozens of numbers, is
put together on the host when the step is over.

Note [What a checksum sees]. The elements of a piece are dealt to classes in turn, as cards to
players. Within a class each 32-bit word of an element, as a signed number, is multiplied by an odd
64-bit number that belongs to its place, and the products are added up modulo 2**64. A bit that
flips adds a power of two below 2**32 times an odd number, which is never 0: it always changes the
sum. Two words that swap places add the product of their difference, which 2**32 does not divide,
and the difference of their numbers, which 2**32 does not divide either, as all of them differ in
their lower halves: it is never 0. The sums of all classes are then mixed, each with its place, by a
function with an inverse, and added up: a change of one class always changes the checksum, and
changes of several cancel with a probability near 2**-64. Integers make this the same in any order
that a device adds in.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rekindle.torch_private.dispatch_modes import past_modes

_CLASSES = 16
"""Classes that the elements of a piece are dealt to; each has a checksum and a sum of its own."""
_PIECE = 1 << 19
"""32-bit words of the largest piece: 2 MiB, and 4 MiB as int64."""
_ROW, _ROWS = 1 << 12, 16
"""Elements of a row, and rows of the tensor that small pieces are copied to."""
_SMALL = 4 * _ROW
"""Elements of the largest piece that is copied to rows."""
_COMPACT = 64
"""Results that are kept apart: a tensor takes at least 512 bytes of a GPU."""
_FIRST, _SECOND, _PLACE = 0x3F58476D1CE4E5B9, 0x14D049BB133111EB, 0x1E3779B97F4A7C15
"""Odd numbers that mix bits (the multipliers of splitmix64, within an int64)."""


@dataclass(frozen=True)
class GradientFingerprint:
    """A checksum of a gradient's bits, its norm, and a sketch of it."""

    checksum: int
    norm: float
    sums: tuple[float, ...]
    """The sums of the sketch: as many for each piece of the gradient."""
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
        self._parts: dict[Any, int] = {}
        """The number of parts that each gradient has come in."""
        self._epsilons: dict[Any, float] = {}
        self._reducers: dict[Any, _Reducer] = {}
        """Reducers of pieces: one for each device, dtype and stream, which share no memory."""

    def add(self, key: Any, gradient: Tensor) -> None:
        """Compute the fingerprint of a gradient, or add a part of one that comes in parts."""
        past_modes(self._add, key, gradient)  # what this runs is no op of the step's

    def _add(self, key: Any, gradient: Tensor) -> None:
        with torch.no_grad():
            tensors = list(_plain_tensors(gradient))
            if not tensors:
                return
            part = self._parts.get(key, 0)
            self._parts[key] = part + 1
            row = 0
            for tensor in tensors:
                if tensor.is_floating_point():
                    epsilon = torch.finfo(tensor.dtype).eps
                    self._epsilons[key] = max(self._epsilons.get(key, 0.0), epsilon)
                reducer = self._reducer_for(tensor)
                for piece in _pieces(tensor, reducer.largest):
                    row += reducer.add(piece, _Place(key, part, row))

    def _reducer_for(self, tensor: Tensor) -> "_Reducer":
        """Return what reduces a tensor: by float32 what it holds exactly, and else by float64."""
        is_single = tensor.is_floating_point() and tensor.dtype != torch.float64
        dtype, device = torch.float32 if is_single else torch.float64, tensor.device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if (device, dtype, stream) not in self._reducers:
            self._reducers[device, dtype, stream] = _Reducer(device, dtype)
        return self._reducers[device, dtype, stream]

    def __contains__(self, key: Any) -> bool:
        return key in self._parts

    def read(self) -> GradientFingerprints:
        """Return the fingerprints by their keys; waits for the device."""
        return past_modes(self._read)

    def _read(self) -> GradientFingerprints:
        found: dict[Any, list[tuple[_Place, _Row]]] = {key: [] for key in self._parts}
        with torch.no_grad():
            for reducer in self._reducers.values():
                for place, row in reducer.read():
                    found[place.key].append((place, row))
        return {
            key: _put_together(rows, self._epsilons.get(key, 0.0)) for key, rows in found.items()
        }


def differing_keys(left: GradientFingerprints, right: GradientFingerprints) -> list[Any]:
    """Return the keys that both have, and whose gradients differ."""
    return [key for key, each in left.items() if key in right and not each.is_same(right[key])]


class _Place(NamedTuple):
    """The gradient that a row belongs to, the part of it, and the row in that part."""

    key: Any
    part: int
    row: int


class _Row(NamedTuple):
    """The sums of a row or a piece, on the host."""

    checksum: int
    norm: float
    sums: list[float]


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a gradient consists of, on this rank."""
    if hasattr(tensor, "to_local"):  # a DTensor
        yield from _plain_tensors(tensor.to_local())
    elif hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain_tensors(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        if tensor.is_complex():
            yield torch.view_as_real(tensor)
        elif tensor.is_floating_point() or tensor.element_size() < 8:
            yield tensor
        else:  # a float64 does not hold each int64
            yield tensor.reshape(-1).view(torch.int32)


def _pieces(tensor: Tensor, largest: int) -> Iterator[Tensor]:
    """Yield a tensor in pieces, which depend on its shape, and not on its strides."""
    count = tensor.numel()
    if count <= largest:
        yield from [tensor] if count else []
    elif rows := largest // (count // len(tensor)):
        yield from tensor.split(rows)
    else:
        for row in tensor.unbind():
            yield from _pieces(row, largest)


class _Reducer:
    """Reduces pieces of one dtype on one device to a few numbers each.

    See Note [Few ops per gradient] and Note [What a checksum sees].
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self.largest = _PIECE * 4 // dtype.itemsize
        self._piece: _Workspace | None = None
        self._rows: _Workspace | None = None
        self._waiting: list[_Place] = []
        """The places of the rows that were copied and are not yet reduced."""
        self._places: list[_Place] = []
        self._results: list[tuple[Tensor, ...]] = []
        """Checksums, sums and norms of what was reduced, in the order of the places."""

    def add(self, piece: Tensor, place: _Place) -> int:
        """Reduce a piece, now or later, and return the number of places that it takes."""
        count = piece.numel()
        if count > _SMALL:
            if self._piece is None:
                self._piece = _Workspace(self._device, self._dtype, 1, self.largest)
            self._piece.copy(piece, 0)
            self._keep([place], self._piece.reduce_first(count))
            return 1
        if self._rows is None:
            self._rows = _Workspace(self._device, self._dtype, _ROWS, _ROW)
        rows = -(-count // _ROW)
        if len(self._waiting) + rows > _ROWS:
            self._reduce_rows(self._rows)
        self._rows.copy(piece, len(self._waiting) * _ROW)
        self._waiting += [place._replace(row=place.row + i) for i in range(rows)]
        return rows

    def read(self) -> Iterator[tuple[_Place, _Row]]:
        """Reduce what waits, and yield all that was reduced."""
        if self._rows is not None and self._waiting:
            self._reduce_rows(self._rows)
        if self._results:
            checksums, sums, norms = (
                torch.cat(each).cpu() for each in zip(*self._results, strict=True)
            )
            mixed = _mix_with_places(checksums, self._places)
            rows = zip(mixed.tolist(), norms.tolist(), sums.tolist(), strict=True)
            yield from zip(self._places, (_Row(*row) for row in rows), strict=True)

    def _reduce_rows(self, rows: "_Workspace") -> None:
        self._keep(self._waiting, rows.reduce_rows(len(self._waiting)))
        self._waiting = []
        rows.values.zero_()  # the next gradients may leave the ends of rows as they are

    def _keep(self, places: list[_Place], result: tuple[Tensor, ...]) -> None:
        self._places += places
        self._results.append(result)
        if len(self._results) == _COMPACT:
            self._results = [tuple(map(torch.cat, zip(*self._results, strict=True)))]


class _Workspace:
    """Rows of elements, the random numbers that each row is multiplied by, and their products."""

    def __init__(self, device: torch.device, dtype: torch.dtype, rows: int, row: int) -> None:
        self.values = torch.zeros(rows * row, dtype=dtype, device=device)
        self._rows = self.values.view(rows, row // _CLASSES, _CLASSES)
        self._numbers, self._signs = random_numbers(row // _CLASSES, device)

    def copy(self, piece: Tensor, start: int) -> None:
        """Copy a piece to the elements from an index on."""
        if not piece.is_floating_point():
            piece = piece.double()
        elif piece.element_size() == 1:  # float8 has no sums
            piece = piece.float()
        target = self.values[start : start + piece.numel()]
        # -0.0 becomes 0.0, as a gradient that is added to zeros does
        torch.add(piece, 0.0, out=target if piece.dim() == 1 else target.view(piece.shape))

    def reduce_rows(self, count: int) -> tuple[Tensor, ...]:
        """Reduce each of the first rows."""
        rows = self._rows if count == len(self._rows) else self._rows[:count]
        return _reduce(rows, self._numbers, self._signs)

    def reduce_first(self, count: int) -> tuple[Tensor, ...]:
        """Reduce the first elements, as one row."""
        if count == len(self.values):
            return _reduce(self._rows, self._numbers, self._signs)
        length = -(-count // _CLASSES)
        end = length * _CLASSES
        if count < end:
            self.values[count:end].zero_()
        row = self.values[:end].view(1, length, _CLASSES)
        return _reduce(row, self._numbers[:length], self._signs[:length])


def _reduce(rows: Tensor, numbers: Tensor, signs: Tensor) -> tuple[Tensor, ...]:
    """Reduce each row to the checksums and the sums of its classes, and its norm."""
    checksums = (rows.view(torch.int32) * numbers).sum(1)
    signed = torch.empty_like(rows, dtype=torch.float64)
    torch.mul(rows, signs, out=signed)
    return checksums, signed.sum(1), torch.linalg.vector_norm(signed, dim=(1, 2))


def random_numbers(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return odd numbers, one for each place in a class, and signs, one for each element.

    The numbers differ in their lower 32 bits: Note [What a checksum sees].
    """
    numbers = _mix(torch.arange(1, length + 1, device=device).mul_(_PLACE)).unsqueeze(1)
    bits = numbers >> torch.arange(32, 32 + _CLASSES, device=device)
    return numbers | 1, bits.bitwise_and_(1).to(torch.int8).mul_(2).sub_(1)


def _mix_with_places(checksums: Tensor, places: list[_Place]) -> Tensor:
    """Return one checksum for each row, which depends on its place and on those of its classes."""
    classes = checksums.shape[1]
    starts = torch.tensor([(place.part << 40) + place.row * classes for place in places])
    indices = starts.unsqueeze(1) + torch.arange(1, classes + 1)
    return _mix(checksums + indices.mul_(_PLACE)).sum(1)


def _mix(numbers: Tensor) -> Tensor:
    """Spread the bits of numbers, in place: two that differ in one bit differ in about half.

    Each shift and each product has an inverse, so different numbers stay different.
    """
    numbers.bitwise_xor_(_shift(numbers, 30)).mul_(_FIRST)
    numbers.bitwise_xor_(_shift(numbers, 27)).mul_(_SECOND)
    return numbers.bitwise_xor_(_shift(numbers, 31))


def _shift(numbers: Tensor, by: int) -> Tensor:
    """Shift to the right, with zeros on the left: copies of the sign would have no inverse."""
    return (numbers >> by).bitwise_and_((1 << (64 - by)) - 1)


def _put_together(rows: list[tuple[_Place, _Row]], epsilon: float) -> GradientFingerprint:
    """Return the fingerprint of a gradient: the sums of its parts are added up."""
    checksum, square = 0, 0.0
    sums: dict[int, list[float]] = {}
    for place, row in rows:
        checksum += row.checksum
        square += row.norm**2
        before = sums.get(place.row)
        added = (
            row.sums if before is None else [a + b for a, b in zip(before, row.sums, strict=True)]
        )
        sums[place.row] = added
    sketch = tuple(each for at in sorted(sums) for each in sums[at])
    return GradientFingerprint(checksum % 2**64, sqrt(square), sketch, epsilon)
