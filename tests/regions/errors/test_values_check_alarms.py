"""`determinism_check="values"` raises no alarm where contents are the same."""

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
from tests.regions.errors.drifts import checked, drift_of
from tests.toys import Block, assert_same_step

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
