"""The pass over graphs: which of the tensors that a policy marks are sent and fetched."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import rekindle
from rekindle import policies
from rekindle.compile import graph_offload, graph_passes, node_tags
from rekindle.regions.selective.decisions import Decision
from tests.graphs import TORCHS_WARNINGS, WEIGHT, Graphs, product
from tests.toys import leaf

pytestmark = [*TORCHS_WARNINGS, pytest.mark.usefixtures("new_offloaders")]


def by_policy(policy: Any, monkeypatch: pytest.MonkeyPatch, region: Any = product) -> Graphs:
    """The graphs on a CPU, as if its memory were a device's: nothing moves when they are run."""
    monkeypatch.setattr(node_tags, "is_on_device", lambda _: True)
    graphs = Graphs()
    run = torch.compile(
        lambda x: rekindle.checkpoint(region, x, context_fn=policy),
        backend=graphs.backend(),
        fullgraph=True,
    )
    run(leaf(4, 8)).sum().backward()
    return graphs


@pytest.mark.parametrize("decision", [policies.offload, policies.spill])
def test_a_policy_offloads_inside_a_graph(decision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = by_policy(decision("aten::mm"), monkeypatch)
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

    monkeypatch.setattr(node_tags, "is_on_device", lambda _: True)
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
    marked.meta[node_tags.DECISION] = Decision.SPILL
    modules = [torch.fx.GraphModule(nn.Module(), graph) for graph in (forward, backward)]
    graph_offload.offload_marked(*modules, outputs=1)
    assert [len(module.graph.find_nodes(op="placeholder")) for module in modules] == [1, 1]
    assert len(modules[0].graph.find_nodes(op="output")[0].args[0]) == 1


def test_sizes_that_change_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_tags, "is_on_device", lambda _: True)
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
