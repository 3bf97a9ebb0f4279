"""Fingerprints see every bit of a gradient, estimate distances, and cost few ops and bytes."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.planner import gradient_fingerprints
from rekindle.planner.gradient_fingerprints import (
    FingerprintCollector,
    GradientFingerprint,
    GradientFingerprints,
    random_numbers,
)
from rekindle.planner.instruments.memory_meter import metered

CPU = torch.device("cpu")
LARGEST = 1 << 19
"""Elements of the largest piece of a float32 gradient that is reduced at once."""
SHAPES = [(), (1,), (17,), (4097,), (128, 64), (3, 70_000), (LARGEST,), (LARGEST + 1,)]
"""Gradients of one row, of several, of a part of a piece, of a piece, and of more."""


def fingerprints(gradients: dict[str, Tensor | None]) -> GradientFingerprints:
    collector = FingerprintCollector()
    for key, gradient in gradients.items():
        if gradient is not None:
            collector.add(key, gradient)
    return collector.read()


def fingerprint(*parts: Tensor) -> GradientFingerprint:
    """The fingerprint of a gradient that comes in parts."""
    collector = FingerprintCollector()
    for part in parts:
        collector.add("", part)
    return collector.read()[""]


class Ops(TorchDispatchMode):
    """Counts ops by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = func.is_view or func is torch.ops.aten.empty_like.default
        self.counts["views and empty tensors" if is_view else str(func)] += 1
        return func(*args, **kwargs or {})


@pytest.fixture
def not_past_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes and meters see the ops of fingerprints."""
    monkeypatch.setattr(
        gradient_fingerprints, "past_modes", lambda function, *args: function(*args)
    )


def kernels(gradients: list[Tensor]) -> int:
    """Ops that gradients take, but for views, in a collector that has its random numbers."""
    collector = FingerprintCollector()
    for i, gradient in enumerate(gradients):
        collector.add(f"warm up {i}", gradient)
    with Ops() as ops:
        for i, gradient in enumerate(gradients):
            collector.add(i, gradient)
    del ops.counts["views and empty tensors"]
    return ops.counts.total()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_bit_of_an_element_changes_the_checksum(shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape)
    bits = gradient.view(-1).view(torch.int32)
    before = fingerprint(gradient).checksum
    seen = {before}
    place = len(bits) * 2 // 3
    for bit in range(32):
        flipped = 1 << bit if bit < 31 else -(1 << 31)
        bits[place] ^= flipped
        seen.add(fingerprint(gradient).checksum)
        bits[place] ^= flipped
    assert len(seen) == 33
    assert fingerprint(gradient).checksum == before


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        (0, 1, 20),
        (0, 16, 5000),
        (15, 16, 5000),
        (5, 4096, 5000),
        (4095, 8192, 8200),
        (0, 16, LARGEST),
        (70_000, 400_000, LARGEST),
        (3, LARGEST + 3, LARGEST + 5),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_two_elements_that_swap_places_change_the_checksum(
    first: int, second: int, size: int, dtype: torch.dtype
) -> None:
    gradient, swapped = torch.ones(size, dtype=dtype), torch.ones(size, dtype=dtype)
    gradient[first] = swapped[second] = -1
    assert not fingerprint(gradient).is_same(fingerprint(swapped))


def test_the_numbers_of_two_places_differ_in_their_lower_halves_and_are_odd() -> None:
    """Note [What a checksum sees]."""
    numbers, _ = random_numbers(LARGEST // 16, CPU)
    lower = numbers.flatten() & 0xFFFFFFFF
    assert len(lower.unique()) == len(lower) == 32_768
    assert (lower & 1).all()


def test_the_mix_of_sums_has_an_inverse() -> None:
    """A mix that shifts copies of the sign gives a number and its complement the same result."""
    numbers = torch.randint(-(2**63), 2**63 - 1, (1000,))
    mixed = gradient_fingerprints._mix(torch.cat([numbers, ~numbers]))
    assert len(mixed.unique()) == 2 * len(numbers.unique())


def test_equal_gradients_have_equal_fingerprints_whatever_came_before() -> None:
    gradients = {str(shape): torch.randn(shape) for shape in SHAPES}
    taken = fingerprints(gradients)
    assert fingerprints(dict(reversed(gradients.items()))) == taken
    assert {key: fingerprint(gradient) for key, gradient in gradients.items()} == taken


@pytest.mark.parametrize("shape", [(100, 30), (700, 900), (40, 30, 20, 25)], ids=str)
def test_strides_do_not_matter(shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape)
    strided = gradient.mT.contiguous().mT
    assert not strided.is_contiguous()
    assert fingerprint(gradient) == fingerprint(strided)


def test_zeros_of_either_sign_are_the_same() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        zeros = torch.zeros(20_000)
        assert fingerprint(zeros.to(dtype)) == fingerprint((-zeros).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e5m2])
def test_the_tensors_that_a_gradient_is_made_of_may_have_any_dtype(dtype: torch.dtype) -> None:
    ones = torch.ones(1 << 20).to(dtype)
    other = ones.clone()
    other[-1] = 0
    assert not fingerprint(ones).is_same(fingerprint(other))


def test_the_last_bit_of_a_large_integer_is_seen() -> None:
    assert not fingerprint(torch.tensor(2**60)).is_same(fingerprint(torch.tensor(2**60 + 1)))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
)
@pytest.mark.parametrize("shape", [(100, 50), (1100, 500)], ids=str)
def test_a_sketch_estimates_how_far_apart_gradients_are(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    gradient = torch.randn(shape, dtype=dtype)
    other = gradient + (0.1 * torch.randn(shape, dtype=dtype))
    taken = fingerprints({"a": gradient, "b": other, "empty": torch.empty(0), "none": None})
    assert taken["a"].norm == pytest.approx(gradient.norm().abs().item(), rel=0.01)
    exact = (gradient - other).norm().abs().item()
    assert 0.5 * exact < taken["a"].distance(taken["b"]) < 2 * exact
    assert "none" not in taken
    assert taken["empty"].norm == 0


@pytest.mark.parametrize("shape", [(512,), (4096,), (512, 1024), (2048, 1024)], ids=str)
def test_a_distance_that_is_the_same_in_each_element_is_estimated(shape: tuple[int, ...]) -> None:
    """Signs that repeat from class to class, or from piece to piece, would cancel at once."""
    gradient = torch.randn(shape)
    other = gradient + 0.1
    exact = (other - gradient).norm().item()
    assert 0.5 * exact < fingerprint(gradient).distance(fingerprint(other)) < 2 * exact


def test_gradients_that_are_not_finite_are_compared_too() -> None:
    nan, zero = torch.full((3,), float("nan")), torch.zeros(3)
    taken = fingerprints({"nan": nan, "again": nan.clone(), "zero": zero, "minus": -zero})
    assert taken["nan"].is_same(taken["again"])
    assert taken["zero"].is_same(taken["minus"])
    assert taken["nan"].distance(taken["zero"]) == float("inf")


def test_a_gradient_that_is_not_finite_leaves_its_neighbours_alone() -> None:
    taken = fingerprints({"nan": torch.full((3,), float("nan")), "ones": torch.ones(4)})
    assert taken["ones"] == fingerprint(torch.ones(4))
    assert taken["ones"].norm == 2


@pytest.mark.parametrize("shape", [(100, 50), (1100, 500)], ids=str)
def test_parts_of_a_gradient_add_up(shape: tuple[int, ...]) -> None:
    first, second = torch.randn(shape).double(), torch.randn(shape).double()
    in_parts, whole = fingerprint(first, second), fingerprint(first + second)
    assert in_parts.distance(whole) < 1e-9
    assert in_parts == fingerprint(first, second)


def test_the_parts_of_a_gradient_have_an_order() -> None:
    first, second = torch.randn(100), torch.randn(100)
    assert not fingerprint(first, second).is_same(fingerprint(second, first))


@pytest.mark.usefixtures("not_past_modes")
def test_sixteen_small_gradients_take_one_op_each_and_six_together() -> None:
    """To copy each; to multiply, add up, set signs, add up, take the norm, and clear the rows."""
    assert kernels([torch.randn(1024) for _ in range(16)]) == 16 + 6


@pytest.mark.usefixtures("not_past_modes")
@pytest.mark.parametrize(
    ("shape", "pieces"), [((256, 256), 1), ((1024, 512), 1), ((4096, 1024), 8), ((3, 600_000), 6)]
)
def test_a_large_gradient_takes_six_ops_a_piece(shape: tuple[int, ...], pieces: int) -> None:
    assert kernels([torch.randn(shape)]) == 6 * pieces


@pytest.mark.usefixtures("not_past_modes")
def test_a_gradient_takes_at_most_7_mib_beside_what_it_takes_itself() -> None:
    transposed = torch.randn(1024, 4096).t()
    for gradient in (torch.randn(4096, 1024), transposed, torch.randn(4096, 1024).bfloat16()):
        collector = FingerprintCollector()
        with metered(CPU, [gradient]) as meter:
            meter.reset()
            collector.add("", gradient)
            collector.add("again", gradient)
            assert meter.peak() <= 7 * 2**20 + 16 * 1024  # results
            assert meter.now() <= 3 * 2**20


@pytest.mark.usefixtures("not_past_modes")
def test_what_is_left_of_a_large_gradient_is_a_few_bytes_per_mib() -> None:
    gradient = torch.randn(1024, 1024)
    collector = FingerprintCollector()
    with metered(CPU, [gradient]) as meter:
        collector.add("first", gradient)
        before = meter.now()
        for i in range(100):
            collector.add(i, gradient)
        # 16 checksums, 16 sums and a norm of each of two pieces
        assert meter.now() - before == 200 * (16 * 8 + 16 * 8 + 8)


@pytest.mark.gpu
def test_a_gpu_finds_the_checksums_that_a_cpu_finds() -> None:
    gradients: dict[str, Tensor | None] = {str(shape): torch.randn(shape) for shape in SHAPES}
    here = fingerprints(gradients)
    there = fingerprints({key: g.cuda() for key, g in gradients.items() if g is not None})
    for key, found in here.items():
        assert found.is_same(there[key])
        assert found.distance(there[key]) <= 1e-9 * found.norm
