"""Offload and compiled code: of what a graph saves, and of what a policy names inside one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import rekindle
from rekindle import policies
from rekindle.compile import graph_offload, graph_passes, node_tags
from rekindle.regions.selective.decisions import Decision
from tests.graphs import TORCHS_WARNINGS, Graphs, fresh_compiler
from tests.toys import Block, Stack, assert_same_step, leaf

pytestmark = TORCHS_WARNINGS


@pytest.fixture(autouse=True)
def fresh(new_engines: None) -> Iterator[None]:
    with fresh_compiler():
        yield


def to_disk() -> Any:
    return rekindle.offload(tier="disk", quota=1.0, min_bytes=1)


BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


@BACKENDS
def test_what_a_compiled_module_saves_is_offloaded(backend: str, written_at_once: None) -> None:
    stack, x = Stack(3), leaf(16, 8)
    compiled = torch.compile(stack, backend=backend, fullgraph=True)

    def offloaded() -> Any:
        with to_disk():
            return compiled(x)

    assert_same_step(lambda: compiled(x), offloaded, [x, *stack.parameters()])
    with rekindle.observe() as seen:
        offloaded().sum().backward()
    assert seen.spill.tensors_out > 0
    assert seen.spill.bytes_in == seen.spill.bytes_out


def test_compiled_blocks_are_offloaded_one_by_one(written_at_once: None) -> None:
    stack, x = Stack(3), leaf(16, 8)
    for block in stack.blocks:
        block.compile(backend="aot_eager", fullgraph=True)

    def offloaded() -> Any:
        with to_disk():
            return stack(x)

    assert_same_step(lambda: stack(x), offloaded, [x, *stack.parameters()])
    with rekindle.observe() as seen:
        offloaded().sum().backward()
    assert seen.spill.tensors_out > 0


@BACKENDS
def test_offload_inside_a_compiled_function_works(backend: str, written_at_once: None) -> None:
    layers, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), leaf(4, 8)
    away = to_disk()

    @torch.compile(backend=backend)
    def run(x: Tensor) -> Any:
        y = x.sin()
        with away:
            return layers(y)

    with rekindle.observe() as seen:
        run(x).sum().backward()
    assert seen.spill.tensors_out > 0
    assert_same_step(lambda: layers(x.sin()), lambda: run(x), [x, *layers.parameters()])


def test_offload_that_is_made_inside_a_compiled_function_works(written_at_once: None) -> None:
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    @torch.compile(backend="aot_eager")
    def run(x: Tensor) -> Any:
        with rekindle.offload(tier="disk", quota=1.0, min_bytes=1):
            return layers(x)

    with rekindle.observe() as seen:
        run(leaf(4, 8)).sum().backward()
    assert seen.spill.tensors_out > 0


@pytest.mark.parametrize("how", ["apply", "wrapper"])
def test_modules_that_are_offloaded_begin_graphs_of_their_own(
    how: str, written_at_once: None
) -> None:
    stack, x = Stack(3), leaf(16, 8)
    plain = Stack(3)
    plain.load_state_dict(stack.state_dict())
    if how == "apply":
        rekindle.apply(stack, to_disk())
    else:
        for i, block in enumerate(stack.blocks):
            options = {"tier": "disk", "min_bytes": 1}
            stack.blocks[i] = rekindle.offload_wrapper(block, **options)  # type: ignore[arg-type]
    compiled = torch.compile(stack, backend="aot_eager")
    with rekindle.observe() as seen:
        compiled(x).sum().backward()
    assert seen.spill.tensors_out > 0
    got, x.grad = x.grad, None
    plain(x).sum().backward()
    assert torch.equal(got, x.grad)  # type: ignore[arg-type]


def test_a_module_that_is_offloaded_is_a_clear_error_in_a_full_graph() -> None:
    stack = Stack(1)
    rekindle.apply(stack, "offload")
    with pytest.raises(Exception, match="begins a graph of its own"):
        torch.compile(stack, backend="aot_eager", fullgraph=True)(leaf(4, 8))


WEIGHT = torch.randn(8, 8, requires_grad=True)


def product(x: Tensor) -> Tensor:
    return ((x @ WEIGHT).sin() @ WEIGHT).exp()


def by_policy(policy: Any, monkeypatch: pytest.MonkeyPatch, region: Any = product) -> Graphs:
    """The graphs on a CPU, as if its memory were a device's: nothing moves when they are run."""
    monkeypatch.setattr(node_tags, "is_away", lambda _: True)
    graphs = Graphs()
    run = torch.compile(
        lambda x: rekindle.checkpoint(region, x, context_fn=policy),
        backend=graphs.backend(),
        fullgraph=True,
    )
    run(leaf(4, 8)).sum().backward()
    return graphs


@pytest.mark.parametrize("fate", [policies.offload, policies.spill])
def test_a_policy_offloads_inside_a_graph(fate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = by_policy(fate("aten::mm"), monkeypatch)
    assert graphs.times("send") == (1, 0)
    assert graphs.times("fetch") == (0, 2)
    assert graphs.times("mm") == (2, 4)
    assert "mm" not in graphs.saved


def test_what_is_to_be_offloaded_if_it_costs_nothing_goes_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = policies.of(lambda *_, **__: rekindle.CheckpointPolicy.PREFER_CPU_OFFLOAD)
    assert by_policy(policy, monkeypatch).times("send") == (1, 0)


def test_what_a_policy_does_not_send_away_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policies.first(1, policies.offload("aten::mm")) | policies.keep("aten::mm")
    graphs = by_policy(policy, monkeypatch)
    assert graphs.times("fetch") == (0, 1)
    assert graphs.saved.count("mm") == 1


def test_a_named_tensor_is_offloaded_inside_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def region(x: Tensor) -> Tensor:
        return rekindle.name((x @ WEIGHT), "wave").sin().exp()

    graphs = by_policy(policies.named("wave", fate="offload"), monkeypatch, region)
    assert graphs.times("fetch") == (0, 1)


def test_what_the_model_returns_is_not_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def region(x: Tensor) -> Any:
        y = x @ WEIGHT
        z = y.sin() @ WEIGHT
        return y.view(-1) + 0, z.sin(), z.view(-1)  # the last shares its memory with what is saved

    monkeypatch.setattr(node_tags, "is_away", lambda _: True)
    graphs, policy = Graphs(), policies.offload("aten::mm")
    run = torch.compile(
        lambda x: rekindle.checkpoint(region, x, context_fn=policy), backend=graphs.backend()
    )
    sum(part.sum() for part in run(leaf(4, 8))).backward()
    assert graphs.times("fetch") == (0, 1)


def test_torchs_settings_are_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch._activation_offloading import activation_offloading  # noqa: PLC0415

    torchs_pass = activation_offloading.enable_activation_offloading
    by_policy(policies.offload("aten::mm"), monkeypatch)
    assert torch._functorch.config.enable_activation_offloading is False
    assert activation_offloading.enable_activation_offloading is torchs_pass
    assert not graph_passes.are_installed()


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


@BACKENDS
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


@BACKENDS
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


@BACKENDS
def test_several_steps_in_flight_keep_their_own(backend: str, written_at_once: None) -> None:
    first, second = leaf(4, 8), leaf(4, 8)
    plain = torch.compile(kept, backend=backend, fullgraph=True)
    away = torch.compile(spilled, backend=backend, fullgraph=True)

    def both(run: Any) -> Any:
        return run(first).sum() * 2 + run(second).sum()

    assert_same_step(lambda: both(plain), lambda: both(away), [first, second, WEIGHT])


@BACKENDS
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
    assert len(graph_offload._tickets) == 2
    out.sum().backward()
    assert not graph_offload._tickets
    out = run(leaf(4, 8))
    del out
    assert not graph_offload._tickets


def test_a_ticket_that_was_copied_is_a_clear_error(written_at_once: None) -> None:
    run = torch.compile(spilled, backend="aot_eager", fullgraph=True)
    x = leaf(4, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        out = run(x)
    with pytest.raises(rekindle.OffloadError, match="ticket"):
        out.sum().backward()


ALL_SPILLED = policies.spill()


@BACKENDS
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


def test_offload_around_leaves_the_tickets_of_a_graph(written_at_once: None) -> None:
    x = leaf(4, 8)
    run = torch.compile(spilled, backend="aot_eager", fullgraph=True)

    def around() -> Any:
        with to_disk():
            return run(x)

    assert_same_step(lambda: run(x), around, [x, WEIGHT])


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
            assert len(graph_offload._tickets) == (3 if run is away else 0)
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


def test_a_saved_result_that_backward_does_not_use_is_neither_sent_nor_saved() -> None:
    """Contrived: torch leaves one where a random op in backward was its user, and is dropped."""
    forward, backward = torch.fx.Graph(), torch.fx.Graph()
    x = forward.placeholder("x")
    marked, out = (forward.call_function(op, (x,)) for op in (torch.sin, torch.cos))
    forward.output((out, marked))
    unused, tangent = (backward.placeholder(name) for name in (marked.name, "tangents_1"))
    backward.output((tangent,))
    with FakeTensorMode():
        for node in (x, marked, out, unused, tangent):
            node.meta["val"] = torch.empty(4, 8)
    marked.meta[node_tags.FATE] = Decision.SPILL
    modules = [torch.fx.GraphModule(nn.Module(), graph) for graph in (forward, backward)]
    graph_offload.offload_marked(*modules, outputs=1)
    assert [len(module.graph.find_nodes(op="placeholder")) for module in modules] == [1, 1]
    assert len(modules[0].graph.find_nodes(op="output")[0].args[0]) == 1


def test_sizes_that_change_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_tags, "is_away", lambda _: True)
    graphs, policy = Graphs(), policies.offload("aten::mm")
    run = torch.compile(
        lambda x: rekindle.checkpoint(product, x, context_fn=policy),
        backend=graphs.backend(),
        dynamic=True,
    )
    run(leaf(4, 8)).sum().backward()
    assert graphs.times("send") == (0, 0)
    assert graphs.saved.count("mm") == 2


def test_what_is_in_host_memory_already_is_kept_there() -> None:
    graphs, policy = Graphs(), policies.offload("aten::mm")
    run = torch.compile(
        lambda x: rekindle.checkpoint(product, x, context_fn=policy), backend=graphs.backend()
    )
    run(leaf(4, 8)).sum().backward()
    assert graphs.times("send") == (0, 0)
    assert graphs.saved.count("mm") == 2


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


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_on_a_gpu_what_compiled_blocks_save_is_offloaded() -> None:
    stack = Stack(4, dim=512).cuda()
    x = leaf(4096, 512, device="cuda")
    for block in stack.blocks:
        block.compile(fullgraph=True)
    stack(x).sum().backward()
    expected, x.grad = x.grad, None
    with rekindle.observe() as seen:
        with rekindle.offload(quota=1.0):
            out = stack(x).sum()
        out.backward()
    assert seen.offload.tensors_out > 0
    torch.testing.assert_close(x.grad, expected)
