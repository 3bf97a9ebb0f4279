"""Small regions under policies, and steps that count what is held and run again."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import rekindle
from rekindle import policies
from rekindle.policies import Policy, every, first, keep, of, offload, recompute, spill
from tests.toys import assert_same_step, leaf

aten = torch.ops.aten


def product(w: Tensor) -> Tensor:
    """Backward needs all three results again: three ops, or less by what is kept."""
    return (w @ w).sin().exp()


def waves(x: Tensor) -> Tensor:
    """Backward needs the first five of six results."""
    for _ in range(6):
        x = x.sin()
    return x


def replayed(function: Callable[..., Any], x: Tensor, context_fn: Any, **options: Any) -> int:
    """Number of ops that are run again for a step of one region."""
    with rekindle.observe() as seen:
        rekindle.checkpoint(function, x, context_fn=context_fn, **options).sum().backward()
    return seen.total.ops_replayed


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool | None:
    return True if op is aten.mm.default else None


class Cube(torch.autograd.Function):
    """Three ops, of which backward needs the second; and none of the ops is named `Cube`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x.abs() * x
        ctx.save_for_backward(square)
        return square * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (square,) = ctx.saved_tensors
        return 3 * square * grad


class Wave(nn.Module):
    """Backward needs its second result, and the next module's backward needs it too."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin().exp()


class Layer(nn.Module):
    """Two waves: four ops to run again."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Wave()
        self.mlp = Wave()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attn(x))


class Net(nn.Module):
    """Two layers, each of them a region: eight ops to run again, two in each `Wave`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, context_fn: Any) -> Tensor:
        for layer in self.layers:
            x = rekindle.checkpoint(layer, x, context_fn=context_fn)
        return x


def replayed_in(net: nn.Module, policy: Any) -> int:
    """Number of ops that are run again for a step of a `Net`."""
    with rekindle.observe() as seen:
        net(leaf(3), policy).sum().backward()
    return seen.total.ops_replayed


SIZE = 256
"""Bytes of every activation of `eight_waves`: 64 numbers."""
LENGTH = 8
DECISIONS = {"keep": keep(), "recompute": recompute(), "offload": offload(), "spill": spill()}
DECISIONS["every second"] = every(2, keep())


def eight_waves(x: Tensor) -> Tensor:
    """Backward needs `x` and all results but the last."""
    for _ in range(LENGTH):
        x = x.sin()
    return x


def answering(answer: Any) -> Policy:
    """A policy that answers the same of every op."""
    return of(lambda *args, **kwargs: answer)


def step(function: Callable[..., Any], x: Tensor, policy: Policy) -> rekindle.Observation:
    """The counts of a step of one region."""
    with rekindle.observe() as seen:
        rekindle.checkpoint(function, x, context_fn=policy).sum().backward()
    return seen


def assert_plain(function: Callable[..., Any], policy: Policy, *leaves: Tensor) -> None:
    """A region whose first argument is a leaf ends a step as the plain function does."""
    x = leaves[0]
    assert_same_step(
        lambda: function(x),
        lambda: rekindle.checkpoint(function, x, context_fn=policy),
        leaves,
    )


def two_products(w: Tensor) -> Tensor:
    """Backward needs the first three results: a product, a `sin`, a product."""
    return ((w @ w).sin() @ w).sin()


Run = Callable[..., Any]


def plain(region: Run, *args: Any) -> Any:
    """Run a region as it is."""
    return region(*args)


def under(policy: policies.Policy) -> Run:
    """Runs regions under a policy."""
    return lambda region, *args: rekindle.checkpoint(region, *args, context_fn=policy)


def check_program(
    policy: policies.Policy, program: Callable[[Run], Any], *leaves: Tensor, **options: Any
) -> None:
    """A program that runs its regions by what it is given has the plain outputs and gradients."""
    assert_same_step(lambda: program(plain), lambda: program(under(policy)), leaves, **options)


POLICIES = {
    "keep": policies.keep(),
    "recompute": policies.recompute(),
    "keep_matmuls_and_attention": policies.keep_matmuls_and_attention,
    "every_second": policies.every(2, policies.keep()),
}


def check(
    policy: policies.Policy,
    region: Callable[..., Any],
    *leaves: Tensor,
    module: nn.Module | None = None,
) -> None:
    """The region has the plain outputs and gradients; its module begins as it is, both times."""
    state = copy.deepcopy(module.state_dict()) if module is not None else {}
    params = [] if module is None else list(module.parameters())

    def program(run: Callable[..., Any]) -> Any:
        if module is not None:
            module.load_state_dict(state)
        out = run(region, *leaves)
        return out, [] if module is None else [buffer.clone() for buffer in module.buffers()]

    check_program(policy, program, *leaves, *params)


def deep(x: Tensor) -> Tensor:
    """Five ops, each of which backward needs something of."""
    return (x.sin() @ x.exp()).tanh().exp()


SOME_POLICIES = [keep(), recompute(), spill(), first(1, keep()), keep(aten.sin)]
