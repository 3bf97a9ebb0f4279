"""Guards on policies: a graph serves the regions whose policy it was made for, and no others."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import rekindle
from rekindle import CheckpointPolicy, policies
from rekindle.policies import Policy, at, every, first, keep, recompute
from tests.graphs import TORCHS_WARNINGS, Graphs
from tests.toys import leaf

pytestmark = TORCHS_WARNINGS


class Wave(nn.Module):
    """Three ops; what is kept of `sin` and of `exp` is saved."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin().cos().exp()


WAVE = Wave()
SIN, EXP = torch.ops.aten.sin.default, torch.ops.aten.exp.default
KEPT: list[list[Any]] = [[SIN, EXP], [], [EXP], [SIN, EXP]]
"""Ops that four regions keep; the last one keeps what the first does."""

Run = Callable[[Tensor], Tensor]
Compile = Callable[[Any], Any]
Way = Callable[[list[Any], Compile], Run]
"""Makes a region that keeps what some ops make, and compiles it."""


def saved_by_each(way: Way) -> list[list[str] | None]:
    """What the graph of each of four regions saves beside its input; None if it has no new graph.

    All are compiled by one backend, as it is where a model's blocks are.
    """
    graphs, found = Graphs(), list[list[str] | None]()
    backend = graphs.backend()
    for ops in KEPT:
        count, saved = graphs.count, len(graphs.saved)
        run = way(ops, functools.partial(torch.compile, backend=backend, fullgraph=True))
        run(leaf(4, 8)).sum().backward()
        found.append(graphs.saved[saved + 1 :] if graphs.count > count else None)
    return found


ONE_FOR_EACH_VALUE = [["sin", "exp"], [], ["exp"], None]
ONE_FOR_EACH_OBJECT = [["sin", "exp"], [], ["exp"], ["sin", "exp"]]


def policy_of(ops: list[Any]) -> Policy:
    return keep(ops) if ops else recompute()


def function_of(ops: list[Any]) -> Callable[..., CheckpointPolicy]:
    """A policy as torch takes it; all have the same code."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def contexts_of(policy: Any) -> Callable[[], Any]:
    def contexts() -> Any:
        return rekindle.create_selective_checkpoint_contexts(policy)

    return contexts


def partial_of(policy: Any) -> Callable[[], Any]:
    return functools.partial(rekindle.create_selective_checkpoint_contexts, policy)


def called(contexts: Callable[[], Any]) -> Callable[[], Any]:
    return lambda contexts=contexts: contexts()  # type: ignore[misc]


class WithPolicy(nn.Module):
    """A module that has its policy as an attribute."""

    def __init__(self, context_fn: Any) -> None:
        super().__init__()
        self.wave, self.context_fn = Wave(), context_fn

    def forward(self, x: Tensor) -> Tensor:
        return rekindle.checkpoint(self.wave, x, context_fn=self.context_fn)  # type: ignore[no-any-return]


def as_argument(x: Tensor, context_fn: Any) -> Tensor:
    return rekindle.checkpoint(WAVE, x, context_fn=context_fn)  # type: ignore[no-any-return]


def by_argument(ops: list[Any], compiled: Compile) -> Run:
    return functools.partial(compiled(as_argument), context_fn=policy_of(ops))


def by_closure(ops: list[Any], compiled: Compile) -> Run:
    policy = policy_of(ops)
    return compiled(lambda x: rekindle.checkpoint(WAVE, x, context_fn=policy))  # type: ignore[no-any-return]


def by_wrapper(ops: list[Any], compiled: Compile) -> Run:
    return compiled(rekindle.checkpoint_wrapper(Wave(), context_fn=policy_of(ops)))  # type: ignore[no-any-return]


def by_decorator(ops: list[Any], compiled: Compile) -> Run:
    return compiled(rekindle.checkpoint(context_fn=policy_of(ops))(WAVE.forward))  # type: ignore[no-any-return]


def by_apply(ops: list[Any], compiled: Compile) -> Run:
    block = Wave()
    rekindle.apply(nn.Sequential(block), {"0": policy_of(ops)})
    return compiled(block)  # type: ignore[no-any-return]


def by_apply_in_a_model(ops: list[Any], compiled: Compile) -> Run:
    model = nn.Sequential(Wave())
    rekindle.apply(model, {"0": policy_of(ops)})
    return compiled(model)  # type: ignore[no-any-return]


def by_attribute(make: Callable[[list[Any]], Any]) -> Way:
    return lambda ops, compiled: compiled(WithPolicy(make(ops)))


class CallableObject:
    """A policy, and contexts, as an object that can be called."""

    def __init__(self, ops: list[Any]) -> None:
        self.ops = ops

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args:
            return rekindle.create_selective_checkpoint_contexts(self.ops)
        return args[1] in self.ops


BY_VALUE: dict[str, Way] = {
    "an argument": by_argument,
    "a closure": by_closure,
    "a wrapper": by_wrapper,
    "a decorator": by_decorator,
    "apply": by_apply,
    "an attribute": by_attribute(policy_of),
    "joined": by_attribute(lambda ops: policy_of(ops) | keep("aten::mm")),
    "in a module": by_attribute(lambda ops: at("wave", policy_of(ops))),
    "counted": by_attribute(lambda ops: first(5, every(1, policy_of(ops)))),
    "policies.of a list": by_attribute(policies.of),
    "policies.of a function": by_attribute(lambda ops: policies.of(function_of(ops))),
    "contexts of a policy": by_attribute(lambda ops: contexts_of(policy_of(ops))),
    "contexts of a function": by_attribute(lambda ops: contexts_of(function_of(ops))),
    "a partial of a list": by_attribute(partial_of),
    "a partial of a function": by_attribute(lambda ops: partial_of(function_of(ops))),
    "a function around a partial": by_attribute(lambda ops: called(partial_of(ops))),
}
BY_IDENTITY: dict[str, Way] = {
    "apply, in a model of its own": by_apply_in_a_model,
    "an object": by_attribute(CallableObject),
    "policies.of an object": by_attribute(lambda ops: policies.of(CallableObject(ops))),
    "a partial of an object": by_attribute(lambda ops: partial_of(CallableObject(ops))),
    "a partial of a policy": by_attribute(lambda ops: partial_of(policy_of(ops))),
}


@pytest.mark.parametrize("way", BY_VALUE.values(), ids=BY_VALUE)
def test_a_graph_serves_regions_with_an_equal_policy_and_no_others(way: Way) -> None:
    assert saved_by_each(way) == ONE_FOR_EACH_VALUE


@pytest.mark.parametrize("way", BY_IDENTITY.values(), ids=BY_IDENTITY)
def test_a_graph_serves_regions_with_the_same_object_and_no_others(way: Way) -> None:
    assert saved_by_each(way) == ONE_FOR_EACH_OBJECT


@pytest.mark.parametrize("way", [by_argument, by_attribute(partial_of)], ids=["policy", "list"])
def test_a_policy_is_guarded_under_the_patch(way: Way) -> None:
    with rekindle.patch_torch():
        assert saved_by_each(way) == ONE_FOR_EACH_VALUE


def test_blocks_of_one_class_with_three_strategies_have_three_graphs() -> None:
    graphs = Graphs()
    backend = graphs.backend()
    model = nn.Sequential(*[Wave() for _ in range(3)])
    rekindle.apply(model, {"0": keep(SIN, EXP), "1": recompute(), "2": keep(EXP)})
    for block in model:
        block.compile(backend=backend, fullgraph=True)
    model(leaf(4, 8)).sum().backward()
    assert graphs.count == 3
    assert graphs.saved == ["input", "sin", "exp", "input", "input", "exp"]


def test_blocks_with_equal_policies_of_their_own_share_one_graph() -> None:
    """More blocks than Dynamo makes graphs of one code."""
    graphs = Graphs()
    backend = graphs.backend()
    count = torch._dynamo.config.recompile_limit + 1
    model = nn.Sequential(*[WithPolicy(keep(SIN)) for _ in range(count)])
    for block in model:
        block.compile(backend=backend, fullgraph=True)
    model(leaf(4, 8)).sum().backward()
    assert graphs.count == 1


def test_another_policy_in_the_same_place_is_a_new_graph() -> None:
    graphs, module = Graphs(), WithPolicy(keep(SIN))
    compiled = torch.compile(module, backend=graphs.backend(), fullgraph=True)
    compiled(leaf(4, 8)).sum().backward()
    module.context_fn = keep(EXP)
    compiled(leaf(4, 8)).sum().backward()
    assert graphs.saved == ["input", "sin", "input", "exp"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_graph_outlives_the_policy_that_it_was_traced_with(backend: str) -> None:
    module = WithPolicy(keep(SIN))
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    x = leaf(4, 8)
    compiled(x)
    module.context_fn = keep(SIN)  # the first is gone
    (compiled_grad,) = torch.autograd.grad(compiled(x).sum(), x)
    (plain_grad,) = torch.autograd.grad(WAVE(x).sum(), x)
    assert torch.equal(compiled_grad, plain_grad)


def test_torch_has_a_graph_for_each_policy_function_and_so_have_we() -> None:
    def keep_sin(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is SIN else CheckpointPolicy.PREFER_RECOMPUTE

    def keep_exp(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is EXP else CheckpointPolicy.PREFER_RECOMPUTE

    torchs = torch.utils.checkpoint
    for checkpoint, contexts in (
        (torchs.checkpoint, torchs.create_selective_checkpoint_contexts),
        (rekindle.checkpoint, rekindle.create_selective_checkpoint_contexts),
    ):
        torch.compiler.reset()
        graphs = Graphs()
        compiled = torch.compile(
            lambda x, context_fn, run=checkpoint: run(
                WAVE, x, use_reentrant=False, context_fn=context_fn
            ),
            backend=graphs.backend(),
            fullgraph=True,
        )
        for policy in (keep_sin, keep_exp, keep_sin):
            compiled(leaf(4, 8), functools.partial(contexts, policy)).sum().backward()
        assert graphs.saved == ["input", "sin", "input", "exp"]
