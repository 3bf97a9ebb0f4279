"""Ops of every sort in a region under a policy: custom, higher-order, random, in place, by hand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

import rekindle
from rekindle import policies
from tests.toys import assert_same_step

POLICIES = {
    "keep": policies.keep(),
    "recompute": policies.recompute(),
    "keep_matmuls_and_attention": policies.keep_matmuls_and_attention,
    "every_second": policies.every(2, policies.keep()),
}
sdpa = functional.scaled_dot_product_attention
dynamo_looks_at_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(params=POLICIES.values(), ids=POLICIES.keys())
def policy(request: pytest.FixtureRequest) -> policies.Policy:
    return request.param


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, 6, requires_grad=True)


@pytest.fixture
def q() -> Tensor:
    return torch.randn(1, 4, 16, 4, requires_grad=True)


def check(
    policy: policies.Policy,
    region: Callable[..., Any],
    *leaves: Tensor,
    module: nn.Module | None = None,
) -> None:
    """The region has the plain outputs and gradients; its module begins as it is, both times."""
    state = copy.deepcopy(module.state_dict()) if module is not None else {}
    params = [] if module is None else list(module.parameters())

    def program(run: Callable[..., Any]) -> Any:
        if module is not None:
            module.load_state_dict(state)
        out = run(region, *leaves)
        return out, [] if module is None else [buffer.clone() for buffer in module.buffers()]

    def checkpointed(region: Callable[..., Any], *args: Tensor) -> Any:
        return rekindle.checkpoint(region, *args, context_fn=policy)

    def plain(region: Callable[..., Any], *args: Tensor) -> Any:
        return region(*args)

    assert_same_step(lambda: program(plain), lambda: program(checkpointed), [*leaves, *params])


def _custom(name: str, function: Callable[..., Any], **options: Any) -> Any:
    op = torch.library.custom_op(f"rekindle_ops::{name}", function, mutates_args=(), **options)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return sum(grad * x.cos() for grad in grads)

    op.register_autograd(backward, setup_context=setup)
    return op


def _wave(x: Tensor) -> Tensor:
    return x.sin()


def _noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def _two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.exp() + x.sin()


def _many(x: Tensor) -> list[Tensor]:
    return [x.sin(), x + 1]


def _other_in_no_grad(x: Tensor) -> Tensor:
    return x * (2 if torch.is_grad_enabled() else 3)


wave = _custom("wave", _wave)
noise = _custom("noise", _noise)
two = _custom("two", _two)
other_in_no_grad = _custom("other_in_no_grad", _other_in_no_grad)
many = torch.library.custom_op("rekindle_ops::many", _many, mutates_args=())


@torch.library.custom_op("rekindle_ops::double_", mutates_args=["x"])
def double_(x: Tensor) -> None:
    x.mul_(2)


@pytest.mark.parametrize("op", [wave, noise, other_in_no_grad], ids=lambda op: op._name)
def test_a_custom_op_with_a_formula(policy: policies.Policy, op: Any, x: Tensor) -> None:
    check(policy, lambda x: op(x.exp()).sin() * op(x), x)


def test_a_custom_op_with_two_results_of_which_one_is_used(
    policy: policies.Policy, x: Tensor
) -> None:
    check(policy, lambda x: two(x.exp())[1].sin(), x)


def test_a_custom_op_that_returns_a_list(policy: policies.Policy, x: Tensor) -> None:
    check(policy, lambda x: x * many(x.detach().exp())[0].cos(), x)


def test_a_custom_op_that_changes_its_argument(policy: policies.Policy, x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        buffer = x.detach().sin()
        before = buffer * 3
        double_(buffer)
        return x * buffer + (x + before).exp()

    check(policy, region, x)


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Contrived: torch refuses the backward on a CPU, for want of a kernel, but can do it."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *args: None)
    monkeypatch.setattr(flex_attention, "_warn_once", lambda *args, **kwargs: None)
    return flex_attention.flex_attention


@dynamo_looks_at_grad
def test_flex_attention_with_a_block_mask(policy: policies.Policy, flex: Any, q: Tensor) -> None:
    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    mask = flex_attention.create_block_mask(causal, 1, 1, 16, 16, device="cpu", BLOCK_SIZE=16)
    check(policy, lambda q: flex(q.sin(), q.cos(), q, block_mask=mask).sin(), q)


@dynamo_looks_at_grad
def test_flex_attention_without_a_gradient_of_its_own(
    policy: policies.Policy, flex: Any, q: Tensor
) -> None:
    def region(q: Tensor) -> Tensor:
        fixed = q.detach()
        return (q * flex(fixed.sin(), fixed.cos(), fixed)).sin()

    check(policy, region, q)


@dynamo_looks_at_grad
def test_cond(policy: policies.Policy, x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.sin().exp(), torch.cos, (x.exp(),)).sin()

    check(policy, region, x)


def test_a_higher_order_operator_that_changes_its_operand(
    policy: policies.Policy, x: Tensor
) -> None:
    def change(t: Tensor) -> tuple[Tensor]:
        return (t.mul_(3).clone(),)

    def region(x: Tensor) -> Tensor:
        buffer = x.detach() + 1
        before = buffer.sin()
        torch.ops.higher_order.cond(torch.tensor(True), change, change, (buffer,))
        return x * buffer + (x * before).exp()

    check(policy, region, x)


class _Plain(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
        wave = x.sin()
        ctx.save_for_backward(x, wave)
        ctx.power, ctx.made = power, wave.cos()
        return wave**power

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, wave = ctx.saved_tensors
        return grad * ctx.power * wave ** (ctx.power - 1) * x.cos() + 0 * ctx.made, None


class _Once(Function):
    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), (x > 0).long()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        out, signs = ctx.saved_tensors
        return grad * out + signs - signs


class _InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.exp_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class _GradInside(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = leaf.exp().sin()
            (ctx.grad,) = torch.autograd.grad(out.sum(), leaf)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.grad


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "intermediates": lambda x: _Plain.apply(x.exp(), 3).sin(),
    "outputs": lambda x: _Once.apply(x.tanh())[0].sin(),
    "mark_dirty": lambda x: _InPlace.apply(x.tanh() + 1).sin(),
    "grad_inside": lambda x: _GradInside.apply(x.tanh()).sin(),
}


@pytest.mark.parametrize("region", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_an_autograd_function(policy: policies.Policy, region: Any, x: Tensor) -> None:
    check(policy, region, x)


class _PastTheDispatcher(Function):
    """Writes as a kernel of Triton does that is given a pointer: no dispatcher sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clone()
        out.numpy()[:] *= 2
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_a_function_whose_kernel_changes_a_copy_past_the_dispatcher(
    policy: policies.Policy, x: Tensor
) -> None:
    check(policy, lambda x: _PastTheDispatcher.apply(x).sin(), x)


NEW = {
    "empty": lambda: torch.empty(6, 6),
    "empty_permuted": lambda: torch.empty_permuted((6, 6), (0, 1)),
    "zeros": lambda: torch.zeros(6, 6),
    "full": lambda: torch.full((6, 6), 1.0),
}


@pytest.mark.parametrize("new", NEW.values(), ids=NEW.keys())
def test_a_new_tensor_that_is_written_past_the_dispatcher(
    policy: policies.Policy, new: Callable[[], Tensor], x: Tensor
) -> None:
    def region(x: Tensor) -> Tensor:
        made = new()
        made.numpy()[:] = 3
        return x * made

    check(policy, region, x)


MASKS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.ones(16, 16).tril().bool()},
    "float": {"attn_mask": torch.linspace(-1, 1, 256).view(16, 16)},
}


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_attention(policy: policies.Policy, backend: Any, mask: Any, q: Tensor) -> None:
    def region(q: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            grouped = sdpa(q.sin(), q[:, :2].cos(), q[:, 2:], enable_gqa=True, **mask)
            return sdpa(q.sin(), q.cos(), grouped, **mask).sin()

    check(policy, region, q)


def test_attention_with_dropout_and_a_mask_that_wants_a_gradient(
    policy: policies.Policy, q: Tensor
) -> None:
    mask = torch.randn(16, 16, requires_grad=True)

    def region(q: Tensor, mask: Tensor) -> Tensor:
        return sdpa(q.sin(), q.cos(), q, attn_mask=mask.sin(), dropout_p=0.3).sin()

    check(policy, region, q, mask)


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
