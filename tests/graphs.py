"""The graphs that `torch.compile` makes of a step: which ops run in forward and which in backward.

The partitioner is the one that inductor uses, with none of inductor's own fusions: every op of a
graph is one that runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch.utils._pytree import tree_leaves

TORCHS_WARNINGS = [
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
"""What the compiler sets off by itself, and minds if it is an error."""


BOTH_BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
"""With the partitioner: ops run as they are written, or fused."""

WEIGHT = torch.randn(8, 8, requires_grad=True)


def product(x: Tensor) -> Tensor:
    """Two matrix products, with a function after each that saves what it is given."""
    return ((x @ WEIGHT).sin() @ WEIGHT).exp()


@dataclass
class Graphs:
    """What was compiled: the ops of forward and backward graphs, by their names."""

    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    """What made the tensors that a forward hands to its backward; `input` for what it was given."""
    count: int = 0
    """How many forward graphs there are."""

    def times(self, op: str) -> tuple[int, int]:
        """How often an op runs: in forward, in backward."""
        return self.forward.count(op), self.backward.count(op)

    def backend(self, **options: Any) -> Callable[..., Any]:
        """A backend that notes its graphs here, and runs them op by op."""
        return aot_autograd(
            fw_compiler=self._note_forward,
            bw_compiler=self._note_backward,
            partition_fn=min_cut_rematerialization_partition,
            **options,
        )

    def _note_forward(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.count += 1
        self.forward += _ops(graph)
        (output,) = graph.graph.find_nodes(op="output")
        outputs = [node for node in tree_leaves(output.args[0]) if isinstance(node, torch.fx.Node)]
        self.saved += [_maker(node) for node in outputs[1:]]  # the first is the result
        return make_boxed_func(graph)

    def _note_backward(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.backward += _ops(graph)
        return make_boxed_func(graph)


def _ops(graph: torch.fx.GraphModule) -> list[str]:
    nodes = (node for node in graph.graph.nodes if node.op == "call_function")
    return [_name(node) for node in nodes]


def _name(node: torch.fx.Node) -> str:
    target = node.target
    if str(target) in ("run_and_save_rng_state", "run_with_rng_state"):  # an op that may draw
        target = next(arg for arg in node.args if callable(arg))
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet))


def _maker(node: torch.fx.Node) -> str:
    if node.op != "call_function":
        return "input"
    if _name(node) in ("getitem", "detach"):  # the latter of torch 2.11
        return _maker(node.args[0])  # type: ignore[arg-type]
    return _name(node)


def graphs_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Graphs:
    """The graphs of one step of a function of which the first result is summed; one graph each."""
    graphs = Graphs()
    compiled = torch.compile(function, backend=graphs.backend(), fullgraph=True)
    out = compiled(*args, **kwargs)
    first: Tensor = tree_leaves(out)[0]
    first.sum().backward()
    return graphs


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Nothing was compiled before, and nothing of it stays.

    Inductor writes plain loops, which a C++ compiler takes two thirds of the time for.
    """
    torch.compiler.reset()
    with inductor_config.patch({"cpp.simdlen": 1, "cpp.vec_isa_ok": True}):
        yield
    torch.compiler.reset()
