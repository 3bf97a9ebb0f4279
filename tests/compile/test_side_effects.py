"""Regions that change Python state, in compiled code: changed once, in one graph."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config
from torch._dynamo.testing import CompileCounterWithBackend

import rekindle
from rekindle import policies
from tests.graphs import TORCHS_WARNINGS, Graphs
from tests.toys import leaf

pytestmark = TORCHS_WARNINGS
SETTING = "skip_fwd_side_effects_in_bwd_under_checkpoint"


@pytest.fixture(autouse=True)
def setting_is_put_back(fresh: None) -> Iterator[None]:
    yield
    assert getattr(config, SETTING) is False


class Stateful(nn.Module):
    """Counts its calls, in a number and in a buffer, and keeps what it made."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.made = 0, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.calls = self.calls + 1
        made = self.project(x).sin()
        self.made.append(made)
        return (made.exp() * self.calls).tanh()


def copy_of(module: Stateful) -> Stateful:
    copy = Stateful()
    copy.load_state_dict(module.state_dict())
    return copy


def step(run: Any, module: Stateful, x: Tensor) -> list[Tensor]:
    """A step whose loss also sees what the module keeps."""
    loss = run(x).sum() + module.made[-1].square().sum()
    return [*torch.autograd.grad(loss, [x, *module.parameters()])]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("policy", [None, policies.keep_matmuls], ids=["full", "selective"])
def test_a_region_changes_python_state_once(backend: str, policy: Any) -> None:
    module, x = Stateful(), leaf(4, 8)
    plain = copy_of(module)
    options = {} if policy is None else {"context_fn": policy}
    run = torch.compile(
        lambda x: rekindle.checkpoint(module, x, **options) * 2, backend=backend, fullgraph=True
    )
    expect = torch.compile(lambda x: plain(x) * 2, backend=backend, fullgraph=True)
    for times in (1, 2):
        found = step(run, module, x)
        assert all(map(torch.equal, found, step(expect, plain, x)))
        assert (module.count, len(module.made), int(module.calls)) == (times, times, times)


def test_a_region_that_changes_python_state_is_made_again_in_backward() -> None:
    module, graphs = Stateful(), Graphs()
    run = torch.compile(
        lambda x: rekindle.checkpoint(module, x), backend=graphs.backend(), fullgraph=True
    )
    run(leaf(4, 8)).sum().backward()
    assert (graphs.times("addmm"), graphs.times("exp")) == ((1, 1), (1, 1))


@pytest.mark.filterwarnings("ignore:The region .*outer is called in compiled code")
def test_a_region_in_a_region_that_changes_python_state_is_right() -> None:
    module, x = Stateful(), leaf(4, 8)
    plain = copy_of(module)

    def outer(x: Tensor) -> Any:
        return rekindle.checkpoint(module, x.cos()).exp()

    run = torch.compile(lambda x: rekindle.checkpoint(outer, x) * 2, backend="aot_eager")
    found = step(run, module, x)
    expected = step(lambda x: plain(x.cos()).exp() * 2, plain, x)
    assert all(map(torch.equal, found, expected))


def test_torchs_setting_is_as_before_when_a_region_cannot_be_traced() -> None:
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.sin()

    with pytest.raises(Exception, match="graph_break"):
        torch.compile(
            lambda x: rekindle.checkpoint(broken, x), backend="aot_eager", fullgraph=True
        )(leaf(3))
    assert getattr(config, SETTING) is False


def test_a_region_of_torchs_in_the_same_graph_keeps_torchs_rule() -> None:
    seen: list[Tensor] = []

    def appends(x: Tensor) -> Tensor:
        seen.append(x.sin())
        return x.cos()

    def run(x: Tensor) -> Any:
        y = rekindle.checkpoint(torch.sin, x)
        return torch.utils.checkpoint.checkpoint(appends, y, use_reentrant=False)

    with pytest.raises(Exception, match="side effect"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(leaf(3))


def llama() -> tuple[Any, Tensor]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).train()
    return model, torch.randint(0, 32, (2, 8))


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "its blocks"])
@pytest.mark.parametrize("what", ["recompute", policies.keep_matmuls], ids=["recompute", "policy"])
def test_a_llama_with_its_cache_on_compiles_with_blocks_that_are_recomputed(
    whole: bool, what: Any
) -> None:
    model, ids = llama()
    plain = torch.compile(model, backend="aot_eager", fullgraph=True) if whole else model
    plain(ids, labels=ids).loss.backward()  # torch 2.11 compiles a whole one to other bits
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    rekindle.apply(model, what)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True) if whole else model
    for layer in () if whole else model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    out = run(ids, labels=ids)
    out.loss.backward()
    assert [layer.keys.shape[-2] for layer in out.past_key_values.layers] == [8, 8]
    assert counter.frame_count == (1 if whole else 2)  # layers differ in their `layer_idx`
    found = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, found, expected))


def test_a_break_in_a_block_of_apply_is_told_by_its_own_line() -> None:
    class Breaking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x.sin()

    module = Breaking()
    rekindle.apply(module, {"": "recompute"})
    module.compile(backend="eager")
    line = Breaking.forward.__code__.co_firstlineno + 1
    with pytest.warns(UserWarning, match=r"region .*Breaking\.forward") as found:
        module(leaf(3))
    assert f'{__file__}", line {line}, in forward: Call to `torch._dynamo.graph' in str(
        found[0].message
    )
