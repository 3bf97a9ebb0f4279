"""Ops with several results, ops that change tensors or draw numbers, and modules with state."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rekindle
from rekindle import policies
from tests.regions.selective.toy_regions import check

SEVERAL: dict[str, Callable[[Tensor], Any]] = {
    "split": lambda x: x.sin().split(2)[1].exp(),
    "unbind": lambda x: x.tanh().unbind(1)[3].exp(),
    "topk": lambda x: (x * 2).topk(2)[0].sin(),
    "max": lambda x: x.exp().max(1)[0].sin(),
    "sort": lambda x: torch.sort(x * 3)[0].sin(),
    "cummax": lambda x: torch.cummax(x.sin(), 1)[0].exp(),
    "svd": lambda x: torch.linalg.svd(x.cos(), full_matrices=False)[1].log(),
    "qr": lambda x: torch.linalg.qr(x.sin())[1].sin(),
    "slogdet": lambda x: torch.linalg.slogdet(x.sin() + 9 * torch.eye(6))[1].sin(),
    "var_mean": lambda x: torch.var_mean(x.exp(), 1)[0].sin(),
    "layer_norm": lambda x: functional.layer_norm(x.sin(), (6,)).exp(),
    "frexp": lambda x: x.sin().frexp()[0].sin(),
    "ctc": lambda x: functional.ctc_loss(
        x.sin()[:, None].log_softmax(2), torch.tensor([[1, 2]]), (6,), (2,), reduction="none"
    ).sin(),
}


@pytest.mark.parametrize("region", SEVERAL.values(), ids=SEVERAL.keys())
def test_an_op_with_several_results_partly_used(
    policy: policies.Policy, region: Any, x: Tensor
) -> None:
    check(policy, region, x)


def _changes_slices(x: Tensor) -> Tensor:
    y = x.sin()
    before = y[1:3] * 2
    y[1:3] = 0
    y[:, 2].mul_(3)
    y[torch.tensor([0, 4])] = x[:2].exp()
    y.masked_fill_(x.detach() > 1, 0.5)
    y.index_add_(0, torch.tensor([1]), x[:1].cos())
    y.t().add_(x)
    y.diagonal().zero_()
    y.scatter_(1, torch.tensor([[1]]), x[:1, :1])
    return y.sin() * before.exp().sum()


def _out_is_given(x: Tensor) -> Tensor:
    out, d = torch.empty(0), x.detach()
    torch.sin(d, out=out)
    twice = out * 2
    torch.mm(d, d, out=out)
    product = out.sin()
    out.resize_(3, 12).fill_(2)
    return (x + twice).sin() * product * out.sum()


def _reads_a_row_before_the_next_is_written(x: Tensor) -> Tensor:
    cache = torch.zeros(4, 6, 6)
    cache[0] = x
    y = cache[0] * 2
    cache[1] = y
    return y.sin()


def _reads_every_second_column(x: Tensor) -> Tensor:
    cache = torch.empty(36, 1000).copy_(torch.linspace(-1, 1, 36_000).view(36, 1000).sin())
    columns = cache[:, ::2]
    sums = columns.sum(1).view(6, 6)
    cache.zero_()
    return x * sums.exp()


def _foreach(x: Tensor) -> list[Tensor]:
    twice = torch._foreach_mul([x.sin(), x.cos()], 2.0)
    powers = torch._foreach_exp(twice)
    torch._foreach_add_(twice, 1)
    return [a.sin() + b.sin() for a, b in zip(twice, powers, strict=True)]


def _gets_other_memory(x: Tensor) -> Tensor:
    y = x.detach() + 1
    y.set_(torch.full((6, 6), 3.0))
    return x * y


def _gets_other_data(x: Tensor) -> Tensor:
    y = x.detach() + 1
    y.data = torch.full((6, 6), 3.0)
    return x * y


def _writes_to_data(x: Tensor) -> Tensor:
    y = x.detach() + 1
    y.data.mul_(3)
    return x * y


CHANGES = {
    "slices": _changes_slices,
    "out": _out_is_given,
    "cache": _reads_a_row_before_the_next_is_written,
    "strides": _reads_every_second_column,
    "foreach": _foreach,
    "set_": _gets_other_memory,
    "other_data": _gets_other_data,
    "data": _writes_to_data,
    "deepcopy": lambda x: x * copy.deepcopy(x.detach()),
    "squeeze_": lambda x: x.sin()[None].squeeze_().exp(),
}


@pytest.mark.parametrize("region", CHANGES.values(), ids=CHANGES.keys())
def test_a_region_that_changes_tensors(policy: policies.Policy, region: Any, x: Tensor) -> None:
    check(policy, region, x)


def _own_generator(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    mask = torch.bernoulli(x.sigmoid().detach(), generator=generator)
    return (x * mask).sin() + (x * torch.randn(6, 6, generator=generator)).exp()


RANDOM: dict[str, Callable[[Tensor], Any]] = {
    "generator": _own_generator,
    "dropout": lambda x: functional.dropout(x.sin(), 0.3).exp(),
    "dropout_in_place": lambda x: functional.dropout(x.sin(), 0.3, inplace=True).sin(),
    "alpha": lambda x: functional.alpha_dropout(x.sin(), 0.3, training=True).sin(),
    "channels": lambda x: functional.dropout1d(x.sin(), 0.3).exp(),
    "features": lambda x: functional.feature_alpha_dropout(x.sin(), 0.3, training=True).exp(),
    "rrelu": lambda x: functional.rrelu(x.sin(), training=True).exp(),
    "gumbel": lambda x: functional.gumbel_softmax(x.sin(), hard=True).sin(),
    "gamma": lambda x: torch.distributions.Gamma(x.exp(), x.exp()).rsample().log(),
    "permutation": lambda x: (x.exp() * torch.randperm(6)).sin() * torch.poisson(x.detach().exp()),
}


@pytest.mark.parametrize("region", RANDOM.values(), ids=RANDOM.keys())
def test_random_numbers(policy: policies.Policy, region: Any, x: Tensor) -> None:
    check(policy, region, x)


def test_numbers_that_are_read_out(policy: policies.Policy, x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        count = len(x[x > 0].tolist()) + torch.nonzero(x > 0).shape[0]
        return x.sin() * x.sum().item() * count

    check(policy, region, x)


class _BuffersOwnUse(nn.Module):
    """Reads a statistic of a batch norm just before the norm changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        before = self.norm.running_var.sqrt()
        return self.norm(x) * before * x


class _Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y, before = x.sin(), self.mean.sin()
        self.mean.lerp_(y.detach().mean(0), 0.5)
        return (y + before).exp() * self.mean.clone()


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(6, 5, 2, dropout=0.2, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.sin()[:, None])[0].sin()


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.sin(), x, x)


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 6, mode="max")
        self.table = nn.Embedding(10, 6, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        where = torch.arange(30).view(6, 5) % 10
        return self.bag(where).sin() * x.sin() + self.table(where[:, 0]).exp()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": lambda: nn.Sequential(nn.Tanh(), nn.BatchNorm1d(6), nn.Tanh()),
    "statistic": _BuffersOwnUse,
    "average": _Average,
    "lstm": lambda: _Recurrent(nn.LSTM),
    "gru": lambda: _Recurrent(nn.GRU),
    "attention": _Attention,
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "weight": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
def test_a_module_called_twice(
    policy: policies.Policy, make: Callable[[], nn.Module], x: Tensor
) -> None:
    module = make()
    check(policy, lambda x: (module(x.sin()), module(x.cos())), x, module=module)


def test_a_parameter_that_is_changed_before_it_is_needed_again_is_an_error() -> None:
    """`max_norm` changes the table in place at every call; to make a look-up again takes it."""
    module = _Bag()
    first = rekindle.checkpoint(module, torch.randn(6, 6), context_fn=policies.recompute())
    module.table.weight.data.mul_(4)
    module(torch.randn(6, 6))
    with pytest.raises(rekindle.CheckpointError, match=r"\[10, 6\], was changed in place"):
        first.sum().backward()
