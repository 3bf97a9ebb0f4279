"""A module's forward, compiled alone: its graphs are at a budget, and shared."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config
from torch._inductor import config as inductor_config

from rekindle.modules.apply_strategies import apply_strategies
from rekindle.modules.compiled_blocks import close_blocks
from rekindle.modules.compiled_forward import CompiledForward
from rekindle.strategy import Compiled
from rekindle.torch_private.compiled_functions import (
    CompileOptions,
    compile_options,
    compiled_call,
    original_of,
)
from rekindle.torch_private.memory_budgets import memory_budget
from tests.graphs import BOTH_BACKENDS, TORCHS_WARNINGS, Graphs, fresh_compiler
from tests.toys import Block, Stack, leaf, same_bits

pytestmark = TORCHS_WARNINGS


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing was compiled before."""
    with fresh_compiler():
        yield


def options_of(backend: str | Callable[..., object] = "aot_eager") -> CompileOptions:
    found = compile_options(torch.compile(lambda x: x, backend=backend, fullgraph=True))
    assert found is not None
    return found


def step(block: nn.Module, x: Tensor) -> tuple[list[Tensor], int]:
    """The gradients of a step from one random state, and the bytes that autograd saved."""
    torch.manual_seed(0)
    nbytes: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        nbytes[saved.untyped_storage().data_ptr()] = saved.nbytes
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = block(x)
    return list(torch.autograd.grad(out.square().sum(), [x, *block.parameters()])), sum(
        nbytes.values()
    )


def at(block: nn.Module, budget: float | None, options: CompileOptions) -> nn.Module:
    """A block whose forward is compiled, with graphs at a budget."""
    forward = CompiledForward(block, options)
    vars(block)["forward"] = forward if budget is None else forward.at_budget(budget)
    return block


def test_the_options_are_those_that_were_given() -> None:
    block = Block()
    block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    found = compile_options(compiled_call(block))
    assert found is not None
    assert (found.fullgraph, found.dynamic) == (True, False)
    assert found == compile_options(
        torch.compile(block.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    )
    assert found != options_of()


@pytest.mark.parametrize(("mode", "captures"), [("default", False), ("reduce-overhead", True)])
def test_the_options_say_whether_cuda_graphs_are_captured(mode: str, captures: bool) -> None:
    found = compile_options(torch.compile(lambda x: x, mode=mode))
    assert found is not None
    assert found.captures_cuda_graphs is captures


def test_what_is_not_compiled_has_no_options() -> None:
    block = Block()
    assert compile_options(block.forward) is None
    assert compile_options(torch.compiler.disable(block.forward)) is None
    assert compiled_call(block) is None
    assert original_of(block.forward) is None


@BOTH_BACKENDS
def test_dropout_is_the_same_at_a_budget(backend: str) -> None:
    """Torch's own setting draws another mask in the backward (pytorch#190758)."""
    block, x, options = Block(16, drop=0.5), leaf(8, 16), options_of(backend)
    expected, most = step(at(block, None, options), x)
    found, nbytes = step(at(block, 0.0, options), x)
    assert nbytes < most
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_torchs_own_budget_draws_another_mask() -> None:
    """The reason for a solver of our own: if this fails, torch no longer needs it."""
    block, x, options = Block(16, drop=0.5), leaf(8, 16), options_of()
    expected, _ = step(at(block, None, options), x)
    torch.compiler.reset()
    with config.patch(activation_memory_budget=0.0):
        found, _ = step(at(block, None, options), x)
    assert not all(map(same_bits, found, expected))


def test_a_lower_budget_saves_less() -> None:
    graphs = Graphs()
    options = options_of(graphs.backend())
    block, x = Block(16), leaf(8, 16)
    saved = [step(at(block, budget, options), x)[1] for budget in (None, 0.5, 0.0)]
    assert saved == sorted(saved, reverse=True)
    assert len(set(saved)) == 3
    assert graphs.count == 3


def test_modules_of_a_class_share_graphs_and_budgets_have_their_own() -> None:
    blocks, options, x = Stack(4).blocks, options_of(), leaf(2, 8)
    before = counters["stats"]["unique_graphs"]
    for budget in (None, 0.5, None, 0.5):
        for block in blocks:
            step(at(block, budget, options), x)
    assert counters["stats"]["unique_graphs"] - before == 2


def test_equal_options_share_graphs() -> None:
    block, x = Block(), leaf(2, 8)
    before = counters["stats"]["unique_graphs"]
    for _ in range(2):
        step(at(block, 0.5, options_of()), x)
    assert counters["stats"]["unique_graphs"] - before == 1


def test_a_forward_of_the_module_itself_is_compiled() -> None:
    block, x = Block(), leaf(2, 8)
    vars(block)["forward"] = CompiledForward(block, options_of(), lambda x: x.sin())
    assert same_bits(block(x), x.sin())


def test_a_module_with_a_forward_of_its_own_takes_what_was_compiled_with_it() -> None:
    block, x = Block(), leaf(2, 8)
    vars(block)["forward"] = CompiledForward(block, options_of(), lambda x: x.sin())
    block(x)
    gone = weakref.ref(block)
    del block
    gc.collect()  # torch's guards hold it in a cycle
    assert gone() is None


def test_without_gradients_a_budget_compiles_nothing_of_its_own() -> None:
    block, x = Block(), leaf(2, 8)
    vars(block)["forward"] = CompiledForward(block, options_of())
    with torch.no_grad():
        expected = block(x)
        before = counters["stats"]["unique_graphs"]
        apply_strategies(block, {"": Compiled(0.5)})
        assert same_bits(block(x), expected)
    assert counters["stats"]["unique_graphs"] == before


def test_a_copy_is_compiled_and_a_pickle_is_not() -> None:
    block, x = at(Block(), None, options_of()), leaf(2, 8)
    other = copy.deepcopy(block)
    assert vars(other)["forward"].__self__ is other
    assert same_bits(other(x), block(x))
    plain = pickle.loads(pickle.dumps(block))
    before = counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    assert same_bits(plain(x), Block.forward(block, x))
    assert counters["stats"]["unique_graphs"] == before
    close_blocks(plain)
    assert "forward" not in vars(plain)


def test_a_budget_is_gone_when_its_graph_is_compiled() -> None:
    before = config.activation_memory_budget, inductor_config.joint_custom_post_pass
    with memory_budget(0.5):
        assert config.activation_memory_budget == 0.5
    assert (config.activation_memory_budget, inductor_config.joint_custom_post_pass) == before
