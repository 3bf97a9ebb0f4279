"""`determinism_check="values"`: changed contents are caught, and nothing else is (field note 2)."""

import functools
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.regions.errors.fingerprint import Fingerprints
from tests.toys import Block, assert_same_step

checked = functools.partial(rekindle.checkpoint, determinism_check="values")


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 8, requires_grad=True)


def drift_of(y: Tensor) -> str:
    with pytest.raises(rekindle.CheckpointError) as caught:
        y.sum().backward()
    return str(caught.value)


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


# What it lets pass


def _in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.relu_()
    y = (y + 1).mul_(2).exp_()
    return y.sin().add_(1)


def _in_place_after_the_last_save(x: Tensor) -> Tensor:
    y = (x * 2).sin()
    z = y * 3
    z.add_(1)
    return z


def _overwritten_but_never_used(x: Tensor) -> Tensor:
    """exp saves its result, which is overwritten; nobody goes back through it."""
    y = x.exp()
    y.add_(1)
    return x.sin()


def _saved_then_overwritten_and_used_again(x: Tensor) -> Tensor:
    scratch = x.detach().clone()
    y = (x.sin() * scratch).detach() + x.cos()
    scratch.zero_()
    return y.sin()


def _views(x: Tensor) -> Tensor:
    y = x.exp().view(8, 4).t()[1:, ::2]
    return y.sin() @ y.t().cos()


def _masks(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.exp(), x.sin()).masked_fill(x < -1, 0.0).sin()


def _empty(x: Tensor) -> Tensor:
    return x.sin() + (x[:0].exp().sin().sum() * 2).cos()


def _nan_and_infinity(x: Tensor) -> Tensor:
    return (x * float("inf")).sin() + (x / 0).exp()


def _complex(x: Tensor) -> Tensor:
    z = torch.complex(x, x.exp())
    return (z * z.conj()).exp().imag + z.sin().real


def _fp8(x: Tensor) -> Tensor:
    return (x.exp().to(torch.float8_e4m3fn).float() * x).sin()


def _bf16(x: Tensor) -> Tensor:
    return (x.bfloat16().exp() @ x.bfloat16().t()).sin().float()


def _autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x.exp() @ x.t()).sin().float()


def _non_contiguous(x: Tensor) -> Tensor:
    return x.t().exp().sin().expand(2, 8, 4).cos()


def _indices(x: Tensor) -> Tensor:
    values, index = x.exp().topk(3)
    return values.sin() + x.gather(1, index).exp()


def _sorted(x: Tensor) -> Tensor:
    return x.sort().values.exp().cumprod(0)


def _attention(x: Tensor) -> Tensor:
    q = x.view(1, 2, 4, 4)
    return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True)


def _pooled(x: Tensor) -> Tensor:
    return nn.functional.max_pool2d(x[None, None].exp(), 2).sin()


def _sparse(x: Tensor) -> Tensor:
    return torch.sparse.mm(x.relu().to_sparse(), x.t().exp()).sin()


@pytest.mark.parametrize(
    "region",
    [
        lambda x: dropout(x.exp(), 0.5).sin(),
        lambda x: nn.functional.rrelu(x.exp() - 1, 0.1, 0.9, training=True),
        lambda x: nn.functional.rrelu(x * 2, 0.1, 0.9, training=True).sin(),
        lambda x: nn.functional.rrelu_(x * 2, 0.1, 0.9, training=True).exp(),
        _in_place,
        _in_place_after_the_last_save,
        _overwritten_but_never_used,
        _saved_then_overwritten_and_used_again,
        _views,
        _masks,
        _empty,
        _nan_and_infinity,
        _complex,
        _fp8,
        _bf16,
        _autocast,
        _non_contiguous,
        _indices,
        _sorted,
        _attention,
        _pooled,
        _sparse,
    ],
    ids=lambda f: f.__name__.strip("_<>"),
)
def test_no_alarm_for(region: Callable[[Tensor], Any], x: Tensor) -> None:
    assert_same_step(lambda: region(x), lambda: checked(region, x), [x])


@pytest.mark.parametrize(
    "model",
    [
        nn.BatchNorm1d(8),
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.RReLU(), nn.Dropout(0.5)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        nn.GroupNorm(2, 8),
        Block(drop=0.5),
    ],
    ids=["batch norm", "with rrelu and dropout", "spectral norm", "group norm", "block"],
)
def test_no_alarm_for_modules(model: nn.Module, x: Tensor) -> None:
    for _ in range(2):
        checked(model, x).sum().backward()
    assert x.grad is not None


def test_no_alarm_for_the_scratch_memory_of_an_lstm(x: Tensor) -> None:
    """oneDNN saves a workspace with gaps that nobody writes to; what is in them is no drift."""
    model = nn.LSTM(8, 4)
    for fill in range(3):
        y = checked(model, x[None])[0].sum()
        for _ in range(8):
            torch.full((28672,), 17 * (fill + 1), dtype=torch.uint8)  # leaves other garbage behind
        y.backward()
    assert x.grad is not None


class Fills(TorchDispatchMode):
    """Has memory that `empty_like` leaves unwritten hold a number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.fill_(self.number) if func is torch.ops.aten.empty_like.default else out


@pytest.mark.parametrize("inplace", [False, True])
def test_no_alarm_for_noise_that_rrelu_neither_writes_nor_reads_in_eval(
    inplace: bool, x: Tensor
) -> None:
    rrelu = nn.RReLU(inplace=inplace).eval()

    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        return rrelu(x.sin()), x.exp()

    with Fills(1.0):
        out, other = checked(region, x)
    with Fills(2.0):
        (grad,) = torch.autograd.grad((out + other).sum(), x)
    expected = torch.autograd.grad(torch.stack(region(x)).sum(), x)[0]
    assert torch.equal(grad, expected)


def test_a_changed_constant_is_caught_when_nothing_else_changed(x: Tensor) -> None:
    scale = torch.ones(8)
    y, other = checked(lambda x: (x * scale.clone(), x.exp()), x)
    scale.fill_(2.0)
    text = drift_of(y + other)
    assert "1 of 2 activations have other values" in text
    assert "x * scale.clone()" in text


def test_no_alarm_for_nested_regions(x: Tensor) -> None:
    block = Block(drop=0.5)
    assert_same_step(
        lambda: block(block(x)),
        lambda: checked(lambda x: checked(block, checked(block, x)), x),
        [x, *block.parameters()],
    )


def test_no_alarm_for_a_backward_for_some_of_the_outputs(x: Tensor) -> None:
    y, z = checked(lambda x: (x.exp().sin(), x.cos().exp()), x)
    del z
    y.sum().backward()
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    assert torch.equal(x.grad, expected)


def test_no_alarm_for_backward_twice(x: Tensor) -> None:
    y = checked(lambda x: dropout(x.exp(), 0.5).sin(), x).sum()
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


def test_no_alarm_for_double_backward(x: Tensor) -> None:
    def twice(run: Callable[..., Tensor]) -> Tensor:
        (g,) = torch.autograd.grad(run(lambda x: x.exp().sin(), x).sum(), x, create_graph=True)
        (gg,) = torch.autograd.grad(g.sum(), x)
        return gg

    assert torch.equal(twice(lambda f, x: f(x)), twice(checked))


def test_the_check_runs_no_op_that_changes_the_random_state(x: Tensor) -> None:
    assert_same_step(lambda: x.exp().sin(), lambda: checked(lambda x: x.exp().sin(), x), [x])


def test_an_unknown_check_is_refused_at_the_call(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"default.*none.*values.*'exact'"):
        rekindle.checkpoint(torch.exp, x, determinism_check="exact")


def test_what_a_replay_saves_beyond_a_forward_that_still_runs_is_not_compared() -> None:
    """A backward inside a region replays it before the forward has come as far."""
    prints, x = Fingerprints(), torch.ones(4)
    site = test_what_a_replay_saves_beyond_a_forward_that_still_runs_is_not_compared.__code__, 0
    prints.add(x, site)
    prints.close()
    prints.compare(0, x, site)
    prints.compare(1, x, site)
    region = SimpleNamespace(saved=SimpleNamespace(slots=[lambda: x]))
    assert not prints.check(region, SimpleNamespace())  # type: ignore[arg-type]
