"""The context that a policy function is given with each op."""

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import rekindle
from rekindle.policies import of
from tests.regions.selective.toy_regions import Layer, Wave, replayed, waves
from tests.toys import leaf

aten = torch.ops.aten


def told(
    function: Callable[..., Any], x: Tensor, what: Callable[[Any], Any]
) -> list[tuple[str, Any]]:
    """What a policy is told of each op of a region."""
    found: list[tuple[str, Any]] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> None:
        found.append((op.name().split("::")[1], what(ctx)))

    rekindle.checkpoint(function, x, context_fn=of(policy))
    return found


def test_a_policy_is_told_the_op_and_its_arguments() -> None:
    x, seen = leaf(3), []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> None:
        assert ctx.op is op
        assert (ctx.args, ctx.kwargs) == (args, kwargs)
        seen.append((op, args[1:], kwargs))

    rekindle.checkpoint(lambda x: torch.add(x.sum(0), 1, alpha=2), x, context_fn=of(policy))
    assert seen == [(aten.sum.dim_IntList, ([0],), {}), (aten.add.Tensor, (1,), {"alpha": 2})]


def test_a_policy_is_told_what_the_op_made() -> None:
    x = torch.ones(3, requires_grad=True)
    found = told(lambda x: (x + 1).max(0)[0] * 2, x, lambda ctx: ctx.op_output)
    assert torch.equal(found[0][1], torch.full((3,), 2.0))
    assert isinstance(found[1][1], tuple)
    assert [part.item() for part in found[1][1]] == [2.0, 0]
    assert found[2][1] == 4


def test_a_policy_is_told_how_often_the_op_ran_in_this_call() -> None:
    def region(x: Tensor) -> Tensor:
        return x.sin().cos().sin().sin().cos()

    expected = [("sin", 0), ("cos", 0), ("sin", 1), ("sin", 2), ("cos", 1)]
    for _ in range(2):
        assert told(region, leaf(3), lambda ctx: ctx.index) == expected


def test_a_policy_is_told_the_size_of_all_that_an_op_made() -> None:
    found = told(lambda x: x.double().sort()[0], leaf(3), lambda ctx: ctx.nbytes)
    assert [size for _, size in found] == [24, 48]  # values and indices


def test_a_policy_is_told_whether_autograd_follows_the_op() -> None:
    def region(x: Tensor) -> Tensor:
        mask = torch.arange(3).cos()
        with torch.no_grad():
            scale = x.tanh()
        return x.sin() * mask * scale * x.detach().exp()

    found = dict(told(region, leaf(3), lambda ctx: ctx.requires_grad))
    assert found == {
        "arange": False,
        "cos": False,
        "tanh": False,
        "sin": True,
        "mul.Tensor": True,
        "exp": False,
    }


def test_a_policy_is_told_the_names_of_the_functions_that_run() -> None:
    def outer(x: Tensor) -> Tensor:
        return rekindle.name(torch.exp, "inner")(x.sin()).cos()

    found = told(lambda x: rekindle.name(outer, "outer")(x).tanh(), leaf(3), lambda ctx: ctx.names)
    assert found == [
        ("sin", ("outer",)),
        ("exp", ("outer", "inner")),
        ("cos", ("outer",)),
        ("tanh", ()),
    ]


def test_a_policy_is_told_the_path_of_the_module() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"one": Layer()})
            self.unlisted = [Wave()]

        def forward(self, x: Tensor) -> Tensor:
            return self.unlisted[0](self.layers["one"](x)).cos()

    found = told(Around(), leaf(3), lambda ctx: ctx.module_path)
    assert [path for _, path in found] == [
        *["layers.one.attn"] * 2,
        *["layers.one.mlp"] * 2,
        *["Wave"] * 2,
        "",
    ]


def test_a_policy_is_given_a_state_of_its_own_for_each_call() -> None:
    def count(ctx: Any) -> int:
        ctx.state["seen"] = ctx.state.get("seen", 0) + 1
        return ctx.state["seen"]

    for _ in range(2):
        assert [n for _, n in told(waves, leaf(3), count)] == [1, 2, 3, 4, 5, 6]


def test_a_policy_is_asked_in_forward_only() -> None:
    x, asked = leaf(3), []

    def policy(ctx: Any, op: Any, *args: Any) -> bool:
        asked.append(ctx.is_recompute)
        return False

    rekindle.checkpoint(waves, x, context_fn=of(policy)).sum().backward()
    assert asked == [False] * 6


def test_ops_of_a_policy_are_none_of_the_regions() -> None:
    def policy(ctx: Any, op: Any, *args: Any) -> bool:
        return bool(ctx.op_output.abs().max() > 100)

    assert replayed(waves, leaf(3), of(policy)) == 5
