"""Policies on a GPU: what is offloaded leaves the device, and gradients are as plain."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from benchmarks.decoder import SHAPES, Block
from rekindle import CheckpointPolicy, policies
from rekindle.policies import MATMULS, every, keep, offload, recompute, spill
from tests.toys import assert_same_step

pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def mlp(width: int = 512) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width)
    ).cuda()


def rows() -> Tensor:
    return torch.randn(1024, 512, device="cuda", requires_grad=True)


POLICIES = [
    keep(),
    recompute(),
    policies.keep_matmuls_and_attention,
    policies.recompute_cheap,
    offload(),
    offload(MATMULS),
    spill(MATMULS),
    every(2, offload()) | every(2, keep()),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_gradients_are_as_plain_over_many_steps(policy: Any) -> None:
    net, x = mlp(), rows()
    leaves = [x, *net.parameters()]
    for _ in range(20):
        assert_same_step(
            lambda: net(x), lambda: rekindle.checkpoint(net, x, context_fn=policy), leaves
        )


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_decoder_block_in_bf16_has_plain_gradients(policy: Any) -> None:
    shape = SHAPES["small"]
    block = Block(shape, device="cuda")
    x = shape.hidden_states(device="cuda").requires_grad_()
    leaves = [x, *block.parameters()]
    for _ in range(3):
        assert_same_step(
            lambda: block(x), lambda: rekindle.checkpoint(block, x, context_fn=policy), leaves
        )


def must_offload(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op is torch.ops.aten.addmm.default:
        return CheckpointPolicy.MUST_CPU_OFFLOAD
    return CheckpointPolicy.PREFER_RECOMPUTE


def contexts() -> Any:
    return rekindle.create_selective_checkpoint_contexts(must_offload)


BLOCKS = 8
HIDDEN = 4 * MIB
"""What the first product of each block makes, and GELU needs."""


def offloaded(nets: list[nn.Module], x: Tensor) -> Tensor:
    for net in nets:
        x = rekindle.checkpoint(net, x, context_fn=contexts)
    return x


def test_must_cpu_offload_offloads_in_eager() -> None:
    """Field note 8: elsewhere it is recomputed without a word.

    The second product of a block is needed by nobody; what backward wants first stays.
    """
    nets, x = [mlp() for _ in range(BLOCKS)], rows()
    for _ in range(4):
        with rekindle.observe() as seen:
            offloaded(nets, x).sum().backward()
    assert seen.offload.bytes_out % HIDDEN == 0
    assert (BLOCKS - 3) * HIDDEN <= seen.offload.bytes_out <= BLOCKS * HIDDEN
    assert seen.offload.bytes_in == seen.offload.bytes_out


def test_what_is_offloaded_is_not_on_the_device_between_forward_and_backward() -> None:
    nets, x = [mlp() for _ in range(BLOCKS)], rows()
    for _ in range(4):
        offloaded(nets, x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with rekindle.observe() as seen:
        out = offloaded(nets, x)
    torch.cuda.synchronize()
    rekindle.offload(quota=1.0, min_bytes=1, derive=False).trim()
    held = torch.cuda.memory_allocated() - before
    inputs = BLOCKS * out.numel() * out.element_size()  # of the later blocks, and the output
    assert held == inputs + BLOCKS * HIDDEN - seen.offload.bytes_out


def test_a_kept_activation_is_all_that_is_held() -> None:
    net, x = mlp(), rows()
    policy = keep(MATMULS)
    rekindle.checkpoint(net, x, context_fn=policy).sum().backward()
    before = torch.cuda.memory_allocated()
    out = rekindle.checkpoint(net, x, context_fn=policy)
    held = torch.cuda.memory_allocated() - before
    assert held == out.numel() * out.element_size() + 4 * MIB


def test_prefer_cpu_offload_offloads_what_costs_no_time() -> None:
    def prefer(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.addmm.default:
            return CheckpointPolicy.PREFER_CPU_OFFLOAD
        return CheckpointPolicy.MUST_RECOMPUTE

    net, x = mlp(), rows()
    leaves = [x, *net.parameters()]
    for _ in range(5):
        assert_same_step(
            lambda: net(x),
            lambda: rekindle.checkpoint(
                net, x, context_fn=lambda: rekindle.create_selective_checkpoint_contexts(prefer)
            ),
            leaves,
        )


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_work_on_another_stream_is_waited_for() -> None:
    net, x = mlp(), rows()
    leaves = [x, *net.parameters()]
    stream = torch.cuda.Stream()

    def other() -> Tensor:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = rekindle.checkpoint(net, x, context_fn=offload(MATMULS))
        torch.cuda.current_stream().wait_stream(stream)
        return out

    for _ in range(10):
        assert_same_step(lambda: net(x), other, leaves)
