"""Every kind of tensor is offloaded right, or stays."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

import rekindle
from tests.offloading import (
    STEPS,
    assert_plain_gradients,
    chain,
    leaf,
    looked_at,
    moved,
    padded,
    spilling,
)

pytestmark = pytest.mark.usefixtures("new_offloaders", "written_at_once")


def spread(x: Tensor) -> Tensor:
    """Some ops in the dtype of x; the result is real."""
    h = ((x * 2).sin() * (x * 3).cos()).exp() / (x + 2)
    h = h * h.t() + h[:1]
    return h.abs()


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64],
    ids=str,
)
def test_floating_dtypes_have_plain_gradients(dtype: torch.dtype) -> None:
    x = leaf(8, 8, dtype=dtype)
    assert_plain_gradients(lambda: spread(spread(x)), [x])


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool, torch.int16],
    ids=str,
)
def test_a_saved_tensor_of_a_narrow_dtype_comes_back(dtype: torch.dtype) -> None:
    expected = (torch.arange(64.0) * 3).to(dtype)

    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward((torch.arange(64.0) * 3).to(dtype))
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (found,) = ctx.saved_tensors
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
            return grad * 2

    x = leaf(64)
    assert moved(lambda: padded(padded(Narrow.apply(x))))[-1][0] == 5


def test_conjugated_and_negated_views_have_plain_gradients() -> None:
    x = leaf(8, dtype=torch.complex64)

    def run() -> Tensor:
        h = x * (1 + 2j)
        h = h.conj() * h + (h * 2).conj().sin()
        h = h * torch.view_as_complex(torch.view_as_real(h).flip(-1)).conj()
        return (h.conj().imag * h.imag).sin() + h.conj().abs()

    assert_plain_gradients(run, [x])


def test_sparse_tensors_have_plain_gradients() -> None:
    x, w = torch.randn(6, 6).relu().to_sparse(), leaf(6, 6)

    def run() -> Tensor:
        return padded(torch.sparse.mm(x * 2.0, (w * 2).sin()))

    assert_plain_gradients(run, [w])


def test_compressed_sparse_tensors_have_plain_gradients() -> None:
    x, w = torch.randn(6, 6).relu().to_sparse_coo().coalesce(), leaf(6, 6)

    def run() -> Tensor:
        return padded(torch.sparse.mm(x, w.exp()).sin())

    assert_plain_gradients(run, [w])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_plain_gradients() -> None:
    x = leaf(6, 4)

    def run() -> Tensor:
        nested = torch.nested.as_nested_tensor([x[:2] * 2, x[2:] * 3])
        return torch.nested.to_padded_tensor(nested.sin().sin(), 0.0)

    assert_plain_gradients(run, [x])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_tensors_have_plain_gradients() -> None:
    x = leaf(6, 4)
    offsets = torch.tensor([0, 2, 6])

    def run() -> Tensor:
        return torch.nested.nested_tensor_from_jagged(x * 2, offsets).sin().cos().values()

    assert_plain_gradients(run, [x])


def test_a_tensor_subclass_comes_back_as_itself() -> None:
    x = leaf(64)
    made = looked_at(lambda: (TwoTensor(x + 1, x + 2),))
    assert [type(found) for (found,) in made] == [TwoTensor] * STEPS


def test_a_tensor_subclass_is_not_moved() -> None:
    x = leaf(64)
    with rekindle.observe() as seen:
        for _ in range(STEPS):
            with spilling():
                loss = chain(TwoTensor(x + 1, x + 2)).sum()
            loss.backward()
    assert seen.spill.tensors_out == 0


def test_a_zero_size_tensor_stays() -> None:
    x = leaf(0, 4)
    assert moved(lambda: chain(x)) == [(0, 0)] * STEPS


def test_an_inference_tensor_raises_as_it_does_plain() -> None:
    with torch.inference_mode():
        x = torch.randn(64)
    w = leaf(64)
    for context in (nullcontext(), spilling()):
        with context, pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            w * x


def test_embeddings_and_integer_indices_have_plain_gradients() -> None:
    table, index = leaf(10, 8), torch.randint(10, (6, 7))

    def run() -> Tensor:
        h = functional.embedding(index + 0, table).sin()
        return padded(h.gather(1, (index % 7).unsqueeze(-1).expand(-1, -1, 8) * 1))

    assert_plain_gradients(run, [table])


def test_ops_with_several_saved_results_have_plain_gradients() -> None:
    x = leaf(4, 3, 8, 8)
    conv, norm, lstm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LSTM(9, 5, num_layers=2)

    def run() -> Tensor:
        h = functional.max_pool2d(norm(conv(x)).relu(), 2)
        h, _ = lstm(h.flatten(2))
        return functional.scaled_dot_product_attention(h, h.sin(), h.cos()).softmax(-1).sort()[0]

    leaves = [x, *conv.parameters(), *norm.parameters(), *lstm.parameters()]
    assert_plain_gradients(run, leaves)


def test_a_tensor_without_a_device_of_ours_stays() -> None:
    x = torch.randn(64, device="meta", requires_grad=True)
    assert moved(lambda: chain(x)) == [(0, 0)] * STEPS


def test_the_host_tier_leaves_host_memory_alone() -> None:
    x = leaf(64)
    with rekindle.observe() as seen:
        with rekindle.offload(min_bytes=1):
            loss = chain(x).sum()
        loss.backward()
    assert (seen.offload.tensors_out, seen.spill.tensors_out) == (0, 0)
