"""Tensors of every kind in a region under a policy."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from rekindle import policies
from tests.ranks import one_rank
from tests.regions.selective.toy_regions import Run, check, check_program, deep, plain, under
from tests.toys import same_bits


def _changes_after_use(t: Tensor) -> Tensor:
    y = t.sin()
    z = y * 2
    y.mul_(3)
    y[1:3].mul_(2)
    return z.exp() + y.sin()


@pytest.mark.parametrize("region", [lambda t: (t.sin().exp() * t).cos(), _changes_after_use])
def test_a_subclass_of_two_tensors(policy: policies.Policy, region: Run, x: Tensor) -> None:
    def program(run: Run) -> Any:
        pair = TwoTensor(x.detach(), x.detach() + 1).requires_grad_()
        out = run(region, pair)
        (grad,) = torch.autograd.grad(out.sum(), pair)
        return out.a, out.b, grad.a, grad.b, x + 0

    check_program(policy, program, x)


@pytest.fixture
def mesh() -> Iterator[Any]:
    with one_rank():
        yield init_device_mesh("cpu", (1,))


@pytest.mark.parametrize("region", [lambda t: (t.sin() @ t).exp() * t.sum(0), _changes_after_use])
def test_a_dtensor(policy: policies.Policy, mesh: Any, region: Run, x: Tensor) -> None:
    def program(run: Run) -> Any:
        return run(region, DTensor.from_local(x, mesh, [Replicate()])).to_local()

    check_program(policy, program, x)


def _values_changed(x: Tensor) -> Tensor:
    sparse = x.detach().relu().to_sparse()
    sparse._values().mul_(3)
    return torch.sparse.mm(sparse, x).sin()


def _sparse_changed(x: Tensor) -> Tensor:
    sparse = x.detach().relu().to_sparse()
    before = torch.sparse.mm(sparse, torch.ones(6, 6))
    sparse.mul_(3)
    return (before + x).sin() + torch.sparse.mm(sparse, x).sin()


def _csr_values_changed(x: Tensor) -> Tensor:
    sparse = x.detach().relu().to_sparse_csr()
    sparse.values().mul_(3)
    return (sparse @ x).sin()


def _jagged(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([x[:2], x[2:]], layout=torch.jagged)


def _jagged_values_changed(x: Tensor) -> Tensor:
    jagged = _jagged(x)
    scale = jagged.detach().sin()
    scale.values().mul_(3)
    return (jagged * scale).values()


def _jagged_changed(jagged: Tensor) -> Tensor:
    y = jagged.sin()
    z = y * 2
    y.mul_(3)
    return z.exp() + y.sin()


def _complex_changed(x: Tensor) -> Any:
    c = torch.complex(x, x.sin()).conj()
    d = c * 2
    c.mul_(3)
    c.imag.mul_(2)
    return torch.view_as_real(d.exp()), torch.view_as_real(c.sin().resolve_conj())


def _complex(x: Tensor) -> Any:
    c = torch.complex(x, x.sin())
    product = (c.conj() * c.exp()).conj().resolve_conj()
    return torch.view_as_real(product).sin(), c.imag.neg().exp(), (c.conj() @ c.mH).abs().cos()


def _quantized(x: Tensor) -> Any:
    quantized = torch.fake_quantize_per_tensor_affine(x.sin(), 0.1, 0, -8, 8).exp()
    return quantized, x.to(torch.float8_e4m3fn).float().sin() * x


def _inference_tensor(x: Tensor) -> Any:
    with torch.inference_mode():
        made = x.sin().exp()
        made.mul_(2)
    return (x + made).sin()


def _no_grad(x: Tensor) -> Any:
    with torch.no_grad():
        made = x.sin().exp()
        made.mul_(2)
        more = made * 3
    return (x + more).sin() * made


KINDS: dict[str, Run] = {
    "sparse": lambda x: torch.sparse.mm((x * x.detach().gt(0)).to_sparse(), x).sin(),
    "sparse_values": _values_changed,
    "sparse_changed": _sparse_changed,
    "csr_values": _csr_values_changed,
    "jagged": lambda x: (_jagged(x).sin() * 2).exp().values(),
    "jagged_changed": lambda x: _jagged_changed(_jagged(x)).values(),
    "jagged_values": _jagged_values_changed,
    "complex": _complex,
    "complex_changed": _complex_changed,
    "quantized": _quantized,
    "empty": lambda x: x[:0].sin().exp().sum(),
    "expanded": lambda x: x.sin().expand(2, 6, 6).exp(),
    "as_strided": lambda x: x.sin().as_strided((3, 3), (6, 2), 1).exp(),
    "unfold": lambda x: x.sin().unfold(0, 2, 1).movedim(0, 1).exp(),
    "other_dtype": lambda x: x.sin() * x.detach().view(torch.int32).float(),
    "inference": _inference_tensor,
    "no_grad": _no_grad,
}


@pytest.mark.parametrize("region", KINDS.values(), ids=KINDS.keys())
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*nested tensors:UserWarning")
def test_a_kind_of_tensor(policy: policies.Policy, region: Run, x: Tensor) -> None:
    check(policy, region, x)


def test_outputs_that_are_inputs_and_views_of_them(policy: policies.Policy, x: Tensor) -> None:
    check(policy, lambda x: {"a": (x, x.t()), "b": [x.view(-1), x.sin(), None, 3]}, x)


def test_fake_tensors(policy: policies.Policy) -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.randn(6, 6, requires_grad=True)
        under(policy)(_changes_after_use, x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (6, 6)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_step_is_traced_by_make_fx(policy: policies.Policy, mode: Any, x: Tensor) -> None:
    def step(run: Run) -> Run:
        return lambda x: torch.autograd.grad(run(deep, x).sum(), x)

    traced = make_fx(step(under(policy)), tracing_mode=mode)(x)
    other = torch.randn(6, 6, requires_grad=True)
    assert same_bits(traced(other)[0], step(plain)(other)[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_function_inside(policy: policies.Policy, x: Tensor) -> None:
    def changes(t: Tensor, buffer: Tensor) -> Tensor:
        buffer.mul_(2)
        return t.sin() * buffer

    compiled = torch.compile(changes, backend="aot_eager")

    def region(x: Tensor) -> Tensor:
        buffer = x.detach() + 1
        before = buffer.sin()
        return compiled(x.cos(), buffer).exp() + (x * before).exp() + x * buffer

    check(policy, region, x)
