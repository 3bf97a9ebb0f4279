"""Autocast, default devices and attention kernels around regions on a GPU."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import rekindle
from tests.gpu.plain_steps import Run, assert_runs_alone, assert_same_with, plain
from tests.toys import Block, Stack, same_bits

pytestmark = pytest.mark.gpu


# What surrounds a region. Backward runs on a thread of autograd's own.


def test_is_recomputing_is_true_in_a_replay_on_autograds_thread(x: Tensor) -> None:
    said = []

    def region(x: Tensor) -> Tensor:
        said.append(rekindle.is_recomputing())
        return x.exp().sin()

    rekindle.checkpoint(region, x).sum().backward()
    assert said == [False, True]


def test_a_device_context_around_the_forward_is_there_in_replay(x: Tensor) -> None:
    def program(run: Run) -> Tensor:
        with torch.device("cuda"):
            return run(lambda x: (x * torch.rand(64)).exp(), x)

    assert_same_with(program, [x])


def test_the_default_dtype_of_the_forward_is_there_in_replay(x: Tensor) -> None:
    def program(run: Run) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            return run(lambda x: (x * torch.full((64,), 1 / 3, device="cuda")).exp(), x)
        finally:
            torch.set_default_dtype(torch.float32)

    assert_same_with(program, [x])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_autocast_around_a_region(x: Tensor, dtype: torch.dtype, cache: bool) -> None:
    model = Stack(depth=2, dim=64, drop=0.3).cuda()

    def program(run: Run) -> Tensor:
        with torch.autocast("cuda", dtype=dtype, cache_enabled=cache):
            return model(x, run)

    assert_same_with(program, [x, *model.parameters()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_inside_a_region(x: Tensor, dtype: torch.dtype) -> None:
    block = Block(64).cuda()

    def region(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=dtype):
            x = block(x)
        with torch.autocast("cuda", enabled=False):
            return block(x.float())

    assert_same_with(lambda run: run(region, x), [x, *block.parameters()])


def test_backward_inside_the_autocast_of_its_forward(x: Tensor) -> None:
    block = Block(64).cuda()
    found = []
    for run in (plain, rekindle.checkpoint):
        x.grad = None
        block.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.no_grad():
                block(x)
            run(block, x).float().sum().backward()
        found.append([x.grad, *(p.grad for p in block.parameters())])
    assert all(map(same_bits, *found))


def test_autocast_of_both_devices_is_there_in_replay(x: Tensor) -> None:
    host = torch.randn(8, 8, requires_grad=True)

    def region(x: Tensor, host: Tensor) -> Tensor:
        return (x @ x.t()).exp().float().mean() + (host @ host.t()).tanh().float().sum().cuda()

    def program(run: Run) -> Tensor:
        with (
            torch.autocast("cuda", dtype=torch.float16),
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            return run(region, x * 0.01, host)

    assert_same_with(program, [x, host])


# Attention. Sequences of one tile: longer ones sum gradients in any order, plain or not.


@pytest.fixture
def q() -> Tensor:
    return torch.randn(2, 2, 64, 64, device="cuda", dtype=torch.float16, requires_grad=True)


def _attend(q: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, q * 2, q + 1, dropout_p=0.3).sin()


KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_attention_with_dropout_has_the_plain_step(q: Tensor, kernel: SDPBackend) -> None:
    def program(run: Run) -> Tensor:
        with sdpa_kernel(kernel):
            return run(_attend, q)

    assert_same_with(program, [q])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_attention_with_dropout_raises_no_alarm_of_the_values_check(
    q: Tensor, kernel: SDPBackend
) -> None:
    with sdpa_kernel(kernel):
        y = rekindle.checkpoint(_attend, q, determinism_check="values")
    y.sum().backward()
    assert q.grad is not None


def test_the_order_of_attention_kernels_around_the_forward_is_there_in_replay(q: Tensor) -> None:
    def program(run: Run) -> Tensor:
        order = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
        with sdpa_kernel(order, set_priority=True):
            return run(_attend, q)

    assert_same_with(program, [q])


def test_the_first_attention_of_a_process_may_be_in_a_region() -> None:
    assert_runs_alone("""
        import torch, rekindle
        from torch.nn.functional import scaled_dot_product_attention

        def attend(q):
            return scaled_dot_product_attention(q.sin(), q, q, is_causal=True)

        def gradient(run):
            q = torch.linspace(-1, 1, 8 * 128 * 64, device="cuda", dtype=torch.bfloat16)
            q = q.view(1, 8, 128, 64).requires_grad_()
            run(attend, q).sum().backward()
            return q.grad

        found = gradient(rekindle.checkpoint)  # raised: other kernels save other tensors
        assert torch.allclose(found, gradient(lambda function, q: function(q)), rtol=0.02)
    """)
