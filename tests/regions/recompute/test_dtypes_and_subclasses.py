"""Tensors of every kind as arguments and inside regions: as in the plain run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import rekindle
from tests.ranks import one_rank
from tests.toys import assert_same_step, same_bits


def assert_same(
    region: Callable[..., Tensor], *args: Any, leaves: list[Tensor] | None = None
) -> None:
    wanted = leaves or [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    assert_same_step(lambda: region(*args), lambda: rekindle.checkpoint(region, *args), wanted)


# Dtypes


def _complex_grads(run: Callable[[], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    out = run()
    (grad,) = torch.autograd.grad(torch.view_as_real(out).sum(), z)
    return out, grad


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex(dtype: torch.dtype) -> None:
    def region(z: Tensor) -> Tensor:
        return (z * z.conj() + torch.fft.fft(z)).exp() * z.imag

    z = torch.randn(3, 4, dtype=dtype, requires_grad=True)
    for a, b in zip(
        _complex_grads(lambda: region(z), z),
        _complex_grads(lambda: rekindle.checkpoint(region, z), z),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_a_lazily_conjugated_argument() -> None:
    z = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    for a, b in zip(
        _complex_grads(lambda: z.conj().exp().sin(), z),
        _complex_grads(lambda: rekindle.checkpoint(lambda z: z.exp().sin(), z.conj()), z),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_a_sparse_argument() -> None:
    adjacency = torch.eye(4).to_sparse()
    x = torch.randn(4, 3, requires_grad=True)
    assert_same(lambda a, x: torch.sparse.mm(a, x.exp()).sin(), adjacency, x)


def test_a_sparse_argument_that_wants_a_gradient() -> None:
    x = torch.randn(4, 3, requires_grad=True)

    def region(a: Tensor, x: Tensor) -> Tensor:
        return torch.sparse.mm(a, x.exp()).sin()

    def step(run: bool) -> list[Tensor]:
        sparse = torch.eye(4).to_sparse().requires_grad_()
        y = rekindle.checkpoint(region, sparse, x) if run else region(sparse, x)
        return [g.to_dense() for g in torch.autograd.grad(y.sum(), (sparse, x))]

    for a, b in zip(step(False), step(True), strict=True):
        assert torch.equal(a, b)


def test_a_sparse_tensor_made_and_saved_inside() -> None:
    x = torch.randn(4, 4, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        return torch.sparse.mm(x.relu().to_sparse(), x.exp()).sin()

    assert_same(region, x)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_csr_argument() -> None:
    adjacency = torch.eye(4).to_sparse_csr()
    x = torch.randn(4, 3, requires_grad=True)
    assert_same(lambda a, x: (a @ x.exp()).sin(), adjacency, x)


def test_an_embedding_with_sparse_gradients() -> None:
    table, index = nn.Embedding(10, 4, sparse=True), torch.tensor([1, 3, 3])

    def step(run: bool) -> Tensor:
        table.zero_grad()
        y = rekindle.checkpoint(table, index) if run else table(index)
        y.exp().sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        return table.weight.grad.to_dense()

    assert torch.equal(step(False), step(True))


def test_bf16() -> None:
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    assert_same(lambda x: layer(x).exp().sin(), x, leaves=[x, *layer.parameters()])


def test_fp16() -> None:
    x = torch.randn(4, 8, dtype=torch.float16, requires_grad=True)
    assert_same(lambda x: (x @ x.t()).tanh().sin(), x)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_casts(dtype: torch.dtype) -> None:
    x = torch.randn(4, 8, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        return (x.exp().to(dtype).to(torch.float32) * x).sin()

    assert_same(region, x)


def test_an_activation_that_is_held_in_fp8() -> None:
    class Compressed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.to(torch.float8_e4m3fn))
            return x.square()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * grad * x.float()

    x = torch.randn(4, 8, requires_grad=True)
    assert_same(lambda x: Compressed.apply(x.sin()).exp(), x)


def test_an_fp8_argument() -> None:
    x, scale = torch.randn(8, requires_grad=True), torch.randn(8).to(torch.float8_e4m3fn)
    assert_same(lambda x, s: (x.exp() * s.float()).sin(), x, scale)


def test_integer_and_boolean_tensors() -> None:
    x, index = torch.randn(4, 8, requires_grad=True), torch.tensor([2, 0])
    mask = torch.arange(8) % 2 == 0
    assert_same(lambda x, i, m: x.exp()[i].masked_fill(m, 0.5).sin(), x, index, mask)


# Shapes and strides


def test_a_zero_size_tensor() -> None:
    x = torch.randn(0, 8, requires_grad=True)
    layer = nn.Linear(8, 4)
    assert_same(lambda x: layer(x).exp().sin(), x, leaves=[x, *layer.parameters()])


def test_a_tensor_without_dimensions() -> None:
    assert_same(lambda x: x.exp().sin(), torch.tensor(0.5, requires_grad=True))


def test_an_expanded_argument() -> None:
    x = torch.randn(1, 8, requires_grad=True)
    assert_same_step(
        lambda: x.expand(4, 8).exp().sin(),
        lambda: rekindle.checkpoint(lambda x: x.exp().sin(), x.expand(4, 8)),
        [x],
    )


def test_a_non_contiguous_argument() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    assert_same_step(
        lambda: x.t()[::2].exp().sin(),
        lambda: rekindle.checkpoint(lambda x: x.exp().sin(), x.t()[::2]),
        [x],
    )


def test_a_channels_last_argument() -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    assert_same(lambda x: conv(x.exp()).relu(), x, leaves=[x, *conv.parameters()])


def test_an_expanded_tensor_made_inside() -> None:
    x = torch.randn(4, 1, requires_grad=True)
    assert_same(lambda x: (x.exp().expand(4, 8) * x).sin(), x)


# Parameters and inference tensors


def test_a_parameter_as_an_argument() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), nn.Parameter(torch.randn(8, 8))
    assert_same(lambda x, w: (x @ w).exp() @ w, x, weight)


def test_a_parameter_as_the_only_argument() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    assert_same(lambda w: (w @ w.t()).tanh(), weight)


def test_an_argument_made_in_inference_mode() -> None:
    x = torch.randn(4, requires_grad=True)
    with torch.inference_mode():
        shift = torch.ones(4)
    assert_same(lambda x, s: (x + s).exp(), x, shift)


# Subclasses


def test_a_subclass_of_two_tensors() -> None:
    def region(x: Tensor) -> Tensor:
        return (x.exp() * x.sin()).cos()

    def step(run: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        x = TwoTensor(torch.randn(4), torch.randn(4)).requires_grad_()
        y = rekindle.checkpoint(region, x) if run else region(x)
        y.sum().backward()
        assert isinstance(x.grad, TwoTensor)
        return x.grad.a, x.grad.b

    for a, b in zip(step(False), step(True), strict=True):
        assert torch.equal(a, b)


def test_a_parameter_of_two_tensors() -> None:
    def step(run: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        weight = nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)))
        x = torch.randn(4, 8, requires_grad=True)

        def region(x: Tensor) -> Tensor:
            return (x @ weight).exp() @ weight

        y = rekindle.checkpoint(region, x) if run else region(x)
        y.sum().backward()
        assert isinstance(weight.grad, TwoTensor)
        return weight.grad.a, weight.grad.b

    for a, b in zip(step(False), step(True), strict=True):
        assert torch.equal(a, b)


def test_a_subclass_of_two_tensors_with_debug_and_the_values_check() -> None:
    x = TwoTensor(torch.randn(4), torch.randn(4)).requires_grad_()
    y = rekindle.checkpoint(lambda x: x.exp().sin(), x, debug=True, determinism_check="values")
    y.sum().backward()
    assert isinstance(x.grad, TwoTensor)


class Named(Tensor):
    """Takes part by `__torch_function__`, keeps its type, and remembers what was called."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_torch_function_subclass() -> None:
    def step(run: bool) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(4).as_subclass(Named).requires_grad_()
        y = rekindle.checkpoint(lambda x: x.exp().sin(), x) if run else x.exp().sin()
        assert type(y) is Named
        y.sum().backward()
        return x.grad.as_subclass(Tensor)

    assert torch.equal(step(False), step(True))


def test_a_torch_function_subclass_computes_under_its_own_rules() -> None:
    class Doubled(Tensor):
        """Runs an extra op that saves for backward, at every call."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            out = super().__torch_function__(func, types, args, kwargs or {})
            if func is Tensor.exp:
                with torch._C.DisableTorchFunctionSubclass():
                    out = (out * out).as_subclass(cls)
            return out

    def step(run: bool) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(4).as_subclass(Doubled).requires_grad_()
        y = rekindle.checkpoint(lambda x: x.exp().sin(), x) if run else x.exp().sin()
        y.sum().backward()
        return x.grad.as_subclass(Tensor)

    assert torch.equal(step(False), step(True))


def test_a_torch_function_subclass_parameter_is_held_as_its_data() -> None:
    class Marked(nn.Parameter):
        pass

    weight, x = Marked(torch.randn(8, 8)), torch.randn(4, 8, requires_grad=True)
    assert_same(lambda x: (x @ weight).exp() @ weight, x, leaves=[x, weight])


@pytest.fixture
def mesh() -> Iterator[Any]:
    """One rank, alone, on the CPU."""
    if not dist.is_gloo_available():
        pytest.skip("needs gloo")
    with one_rank():
        yield dist.init_device_mesh("cpu", (1,))


def test_a_dtensor_argument_and_dtensor_parameters(mesh: Any) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]))
    x = distribute_tensor(torch.randn(4, 8), mesh, [Replicate()]).requires_grad_()

    def region(x: Tensor) -> Tensor:
        return ((x @ weight).exp() @ weight).sin()

    def step(run: bool) -> list[Tensor]:
        x.grad = weight.grad = None
        y = rekindle.checkpoint(region, x) if run else region(x)
        y.sum().backward()
        assert isinstance(x.grad, DTensor)
        assert isinstance(weight.grad, DTensor)
        return [x.grad.full_tensor(), weight.grad.full_tensor()]

    for a, b in zip(step(False), step(True), strict=True):
        assert same_bits(a, b)


def test_a_dtensor_made_inside_a_region(mesh: Any) -> None:
    x = torch.randn(4, 8, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        split = DTensor.from_local(x.exp(), mesh, [Shard(0)], run_check=False)
        return (split * split).sin().to_local()

    assert_same(region, x)


def test_a_dtensor_with_the_values_check_and_debug(mesh: Any) -> None:
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)]).requires_grad_()
    y = rekindle.checkpoint(lambda x: x.exp().sin(), x, determinism_check="values", debug=True)
    y.sum().backward()
    assert x.grad is not None
