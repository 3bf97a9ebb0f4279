"""`determinism_check="values"` catches every change of the content of an activation."""

import random
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

import rekindle
from tests.regions.errors.drifts import checked, drift_of

# What it catches


def test_a_scalar_from_outside_that_changed_is_caught(x: Tensor) -> None:
    scale = [2.0]

    def region(x: Tensor) -> Tensor:
        y = x.exp() * scale[0]
        return y.sin()

    y = checked(region, x)
    scale[0] = 2.5
    text = drift_of(y)
    assert "region did not replay as it ran" in text
    assert "1 of 2 activations have other values" in text
    assert "float32[4, 8] cpu" in text
    assert "y.sin()" in text
    assert re.search(r"test_values_check\.py:\d+", text)
    assert "Likely cause:" in text
    assert "Try:" in text


def test_the_error_says_by_how_much(x: Tensor) -> None:
    shift = [0.0]

    def region(x: Tensor) -> Tensor:
        return (x + shift[0]).sin()

    with torch.no_grad():
        x.zero_()
    y = checked(region, x)
    shift[0] = 0.5
    text = drift_of(y)
    assert "norm 0 in forward" in text
    assert f"{0.5 * 32**0.5:.9g} in replay"[:6] in text
    assert "of 32 elements looked at 32 differ, by at most 0.5" in text


def test_the_default_check_lets_changed_values_pass(x: Tensor) -> None:
    scale = [2.0]
    y = rekindle.checkpoint(lambda x: (x * scale[0]).sin(), x)
    scale[0] = 2.5
    y.sum().backward()
    assert torch.equal(x.grad, (x * 2.5).cos() * 2.0)


def test_a_weight_changed_in_place_is_caught(x: Tensor) -> None:
    layer = nn.Linear(8, 8)
    y = checked(lambda x: layer(x).exp(), x)
    with torch.no_grad():
        layer.weight.mul_(1.0001)
    assert "activation" in drift_of(y)


def test_a_weight_exchanged_behind_autograds_back_is_caught(x: Tensor) -> None:
    layer = nn.Linear(8, 8)
    y = checked(lambda x: layer(x).exp(), x)
    layer.weight.data = layer.weight.data * 1.0001
    assert "activation" in drift_of(y)


def test_random_numbers_from_elsewhere_are_caught(x: Tensor) -> None:
    source = random.Random(0)
    y = checked(lambda x: (x * source.random()).sin(), x)
    assert "random generator" in drift_of(y)


def test_random_numbers_that_are_not_torchs_are_caught(x: Tensor) -> None:
    y = checked(lambda x: (x * random.random()).sin(), x)
    assert "random generator" in drift_of(y)


def test_another_mask_without_preserve_rng_state_is_caught(x: Tensor) -> None:
    y = checked(lambda x: dropout(x, 0.5).sin(), x, preserve_rng_state=False)
    assert "preserve_rng_state=False" in drift_of(y)


def test_one_flipped_bit_is_caught() -> None:
    x = torch.randn(3000, requires_grad=True)
    once = torch.zeros(3000)

    def region(x: Tensor) -> Tensor:
        return (x * 2 + once).sin()

    y = checked(region, x)
    once[2017] = (2 * x[2017]).abs().item() * 2**-23
    assert "1 of 1 activations" in drift_of(y)


def test_a_drift_outside_the_elements_looked_at_says_so() -> None:
    x = torch.zeros(10_000, requires_grad=True)
    once = torch.zeros(10_000)
    y = checked(lambda x: (x + once).sin(), x)
    once[77] = 3.0
    text = drift_of(y)
    assert "norm 0 in forward, 3 in replay" in text


def _permuted(make: Callable[[], Tensor], order: list[int]) -> str:
    """The drift of an activation whose rows come in another order in replay."""
    rows = make()
    state = [rows]
    w = torch.ones(rows.shape[1], requires_grad=True)
    y = checked(lambda w: w * state[0], w)
    state[0] = rows[order]
    return drift_of(y)


def test_permuted_rows_are_caught() -> None:
    assert "1 of 1" in _permuted(lambda: torch.randn(4, 8), [1, 0, 2, 3])


@pytest.mark.parametrize("columns", [8, 512, 1024, 2048])
def test_permuted_one_hot_rows_are_caught(columns: int) -> None:
    """Routing masks: sums over rows and over columns do not change."""
    assert "1 of 1" in _permuted(lambda: torch.eye(columns)[:4], [1, 0, 2, 3])


@pytest.mark.parametrize("columns", [8, 1024])
def test_permuted_boolean_rows_are_caught(columns: int) -> None:
    assert "1 of 1" in _permuted(lambda: torch.eye(columns)[:4] > 0, [1, 0, 2, 3])


def test_rows_shifted_against_each_other_are_caught() -> None:
    x = torch.zeros(2, 2048)
    x[0, 0] = x[1, 1] = 1
    state, w = [x], torch.ones(2048, requires_grad=True)
    y = checked(lambda w: w * state[0], w)
    state[0] = x.flip(0)
    assert "1 of 1" in drift_of(y)


def test_a_sign_that_flips_on_zero_is_caught() -> None:
    """-0.0 equals 0.0 but leads elsewhere: 1/x."""
    x, sign = torch.zeros(4, requires_grad=True), [1.0]
    y = checked(lambda x: (x * sign[0]).sin(), x)
    sign[0] = -1.0
    assert "1 of 1" in drift_of(y)


def test_a_nan_that_appears_is_caught(x: Tensor) -> None:
    bad = [0.0]
    y = checked(lambda x: (x + bad[0]).sin(), x)
    bad[0] = float("nan")
    assert "nan in replay" in drift_of(y)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128]
)
def test_changed_values_are_caught_in(dtype: torch.dtype) -> None:
    x, scale = torch.randn(8).to(dtype).requires_grad_(), [2.0]
    y = checked(lambda x: (x * scale[0]).sin().abs(), x)
    scale[0] = 3.0
    assert "activations have other values" in drift_of(y)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_a_changed_index_or_mask_is_caught_in(dtype: torch.dtype) -> None:
    x = torch.randn(2, requires_grad=True)
    state = [torch.tensor([1, 0]).to(dtype)]
    y = checked(lambda x: x.exp()[state[0].long()] if dtype == torch.int64 else x * state[0], x)
    state[0] = torch.tensor([0, 1]).to(dtype)
    assert "activations have other values" in drift_of(y)


def test_a_changed_value_is_caught_without_early_stop(x: Tensor) -> None:
    scale = [2.0]
    y = checked(lambda x: (x * scale[0]).sin() + 1, x, early_stop=False)
    scale[0] = 2.5
    assert "1 of 1" in drift_of(y)


def test_a_changed_value_is_caught_in_an_inner_region(x: Tensor) -> None:
    scale = [2.0]

    def inner(x: Tensor) -> Tensor:
        return (x * scale[0]).sin()

    def outer(x: Tensor) -> Tensor:
        return checked(inner, x.cos()).sum()

    y = rekindle.checkpoint(outer, x)
    scale[0] = 2.5
    assert "inner did not replay" in drift_of(y)


def test_a_changed_value_is_caught_in_a_second_backward(x: Tensor) -> None:
    scale = [2.0]
    y = checked(lambda x: (x * scale[0]).sin(), x).sum()
    y.backward(retain_graph=True)
    scale[0] = 2.5
    assert "1 of 1" in drift_of(y)


def test_backward_works_again_when_the_value_is_back(x: Tensor) -> None:
    scale = [2.0]
    y = checked(lambda x: (x * scale[0]).sin(), x).sum()
    scale[0] = 2.5
    with pytest.raises(rekindle.CheckpointError):
        y.backward(retain_graph=True)
    scale[0] = 2.0
    y.backward()
    assert torch.equal(x.grad, (x * 2).cos() * 2)
