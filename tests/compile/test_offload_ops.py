"""What a graph sends to the offload engine by a policy comes back in its backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import policies
from rekindle.compile.offload_ops import tickets_alive
from tests.graphs import BOTH_BACKENDS, TORCHS_WARNINGS, WEIGHT, product
from tests.toys import Block, assert_same_step, leaf

pytestmark = [*TORCHS_WARNINGS, pytest.mark.usefixtures("new_offloaders")]


SPILLED = policies.spill("aten::mm")
KEPT = policies.keep("aten::mm")


def spilled(x: Tensor) -> Any:
    return rekindle.checkpoint(product, x, context_fn=SPILLED)


def kept(x: Tensor) -> Any:
    return rekindle.checkpoint(product, x, context_fn=KEPT)


def deep(x: Tensor) -> Tensor:
    for _ in range(8):
        x = (x @ WEIGHT).sin()
    return x


@BOTH_BACKENDS
def test_what_a_graph_sends_away_comes_back(backend: str, written_at_once: None) -> None:
    x = leaf(4, 8)
    plain = torch.compile(deep, backend=backend, fullgraph=True)
    away = torch.compile(
        lambda x: rekindle.checkpoint(deep, x, context_fn=SPILLED), backend=backend, fullgraph=True
    )
    for _ in range(3):
        assert_same_step(lambda: plain(x), lambda: away(x), [x, WEIGHT])
    with rekindle.observe() as seen:
        away(x).sum().backward()
    traffic, product_bytes = seen.spill, 4 * 8 * 4
    assert traffic.tensors_out == traffic.tensors_in == 6  # the last ones stay, as in eager code
    assert traffic.bytes_out == traffic.bytes_in == 6 * product_bytes


class Attending(nn.Module):
    """Attention, dropout, and a norm whose buffers change."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(8, 24), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(2, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = nn.functional.dropout(out.transpose(1, 2).flatten(0, 1).flatten(1), 0.5)
        return x + self.norm(out)


@BOTH_BACKENDS
@pytest.mark.parametrize(
    "policy",
    [
        policies.spill(),
        policies.spill(policies.MATMULS | policies.ATTENTION),
        policies.every(2, policies.spill(policies.MATMULS)) | policies.keep(policies.ATTENTION),
    ],
    ids=["all", "compute", "every second"],
)
def test_blocks_that_offload_in_one_graph_have_the_gradients_of_those_that_keep(
    policy: Any, backend: str, written_at_once: None
) -> None:
    blocks, x = nn.ModuleList(Attending() for _ in range(3)), leaf(8, 8)

    def run(x: Tensor, policy: Any) -> Any:
        for block in blocks:
            x = rekindle.checkpoint(block, x, context_fn=policy)
        return x.sin()

    kept = torch.compile(lambda x: run(x, EVERYTHING), backend=backend, fullgraph=True)
    away = torch.compile(lambda x: run(x, policy), backend=backend, fullgraph=True)
    leaves = [x, *blocks.parameters()]
    for _ in range(2):
        assert_close_step(lambda: kept(x), lambda: away(x), leaves, exact=backend == "aot_eager")


EVERYTHING = policies.keep()


def assert_close_step(plain: Any, other: Any, leaves: list[Tensor], exact: bool) -> None:
    """The same gradients, bit for bit if ops run as they are written."""
    found = []
    for run in (plain, other):
        torch.manual_seed(0)
        found.append(torch.autograd.grad(run().sum(), leaves))
    for one, another in zip(*found, strict=True):
        assert torch.equal(one, another) if exact else torch.allclose(one, another, atol=1e-5)


@BOTH_BACKENDS
def test_several_steps_in_flight_keep_their_own(backend: str, written_at_once: None) -> None:
    first, second = leaf(4, 8), leaf(4, 8)
    plain = torch.compile(kept, backend=backend, fullgraph=True)
    away = torch.compile(spilled, backend=backend, fullgraph=True)

    def both(run: Any) -> Any:
        return run(first).sum() * 2 + run(second).sum()

    assert_same_step(lambda: both(plain), lambda: both(away), [first, second, WEIGHT])


@BOTH_BACKENDS
def test_a_graph_that_is_retained_gives_the_same_again(backend: str, written_at_once: None) -> None:
    x = leaf(4, 8)
    with torch._functorch.config.patch(donated_buffer=False):  # else torch refuses
        out = torch.compile(spilled, backend=backend, fullgraph=True)(x).sum()
        found = [torch.autograd.grad(out, [x, WEIGHT], retain_graph=i < 2) for i in range(3)]
    for grads in found[1:]:
        assert all(map(torch.equal, grads, found[0]))


def test_what_was_sent_is_let_go_with_the_graph_that_sent_it(written_at_once: None) -> None:
    run = torch.compile(spilled, backend="aot_eager", fullgraph=True)
    out = run(leaf(4, 8))
    assert tickets_alive() == 2
    out.sum().backward()
    assert tickets_alive() == 0
    out = run(leaf(4, 8))
    del out
    assert tickets_alive() == 0


def test_a_ticket_that_was_copied_is_a_clear_error(written_at_once: None) -> None:
    run = torch.compile(spilled, backend="aot_eager", fullgraph=True)
    x = leaf(4, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        out = run(x)
    with pytest.raises(rekindle.OffloadError, match="ticket"):
        out.sum().backward()


ALL_SPILLED = policies.spill()


@BOTH_BACKENDS
def test_results_that_a_compiler_lays_out_otherwise_come_back(
    backend: str, written_at_once: None
) -> None:
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GELU(), nn.Conv2d(6, 6, 3), nn.GELU())
    x = leaf(2, 3, 12, 12)
    away = torch.compile(
        lambda x: rekindle.checkpoint(net, x, context_fn=ALL_SPILLED), backend=backend
    )
    leaves = [x, *net.parameters()]
    for found, expected in zip(
        torch.autograd.grad(away(x).sum(), leaves),
        torch.autograd.grad(net(x).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def drawing(x: Tensor) -> Tensor:
    """Ops that draw random numbers: each has its random state saved by the forward graph."""
    y = nn.functional.rrelu((x @ WEIGHT).sin(), training=True) * torch.randperm(8) / 8
    y = nn.functional.dropout((y @ WEIGHT).sin(), 0.5) * torch.multinomial(torch.ones(4, 9), 8) / 8
    return (y @ WEIGHT).sin()


def test_a_region_that_draws_random_numbers_sends_and_fetches_under_inductor(
    written_at_once: None,
) -> None:
    x, found = leaf(4, 8), []
    away = torch.compile(
        lambda x: rekindle.checkpoint(drawing, x, context_fn=SPILLED), fullgraph=True
    )
    with torch._inductor.config.patch(fallback_random=True):  # both draw in the same order
        for run in (away, torch.compile(drawing, fullgraph=True)):
            torch.manual_seed(0)
            out = run(x)
            assert tickets_alive() == (3 if run is away else 0)
            found.append(torch.autograd.grad(out.sum(), [x, WEIGHT]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_memory_that_is_sent_is_not_used_again_for_what_nobody_reads(
    written_at_once: None,
) -> None:
    """Random ops are not dead to torch: what they read is computed, wherever there is memory."""
    block, x, found = Block(drop=0.5), leaf(4, 8), []

    def run(x: Tensor) -> Tensor:
        out = rekindle.checkpoint(block, x, context_fn=ALL_SPILLED)
        rekindle.checkpoint(block, x * 2, context_fn=ALL_SPILLED)
        return out  # type: ignore[no-any-return]

    with torch._inductor.config.patch(fallback_random=True):
        for step in (torch.compile(run, fullgraph=True), block):
            torch.manual_seed(0)
            found.append(torch.autograd.grad(step(x).sum(), [x, *block.parameters()]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_on_a_gpu_a_policy_offloads_inside_a_graph(backend: str) -> None:
    weight = leaf(512, 512, device="cuda")

    def block(x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x @ weight).sin()
        return x

    def held(policy: Any) -> tuple[Tensor, int]:
        torch.compiler.reset()
        x = torch.full((2048, 512), 0.5, device="cuda", requires_grad=True)
        run = torch.compile(
            lambda x: rekindle.checkpoint(block, x, context_fn=policy),
            backend=backend,
            fullgraph=True,
        )
        run(x).sum().backward()
        x.grad = None
        before = torch.cuda.memory_allocated()
        out = run(x).sum()
        bytes_held = torch.cuda.memory_allocated() - before
        out.backward()
        assert x.grad is not None
        return x.grad, bytes_held

    kept, bytes_kept = held(policies.keep("aten::mm"))
    away, bytes_away = held(policies.offload("aten::mm"))
    torch.testing.assert_close(kept, away)
    assert bytes_away == bytes_kept - 2 * 2048 * 512 * 4  # the last ones stay
