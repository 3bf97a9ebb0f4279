"""Calls that mypy accepts or refuses: read by mypy in `test_signatures.py`, never run.

A line that mypy refuses has a `type: ignore` with the code of the error; strict mode reports one
that is of no use.
"""

from typing import assert_type

from torch import Tensor, nn

import rekindle
from rekindle import policies


def scaled(x: Tensor, scale: float, *, shift: int = 0) -> Tensor:
    return x * scale + shift


def pair(x: Tensor) -> tuple[Tensor, int]:
    return x, 1


def a_call_returns_what_the_function_returns(x: Tensor) -> None:
    assert_type(rekindle.checkpoint(scaled, x, 2.0), Tensor)
    assert_type(rekindle.checkpoint(scaled, x, scale=2.0, shift=1), Tensor)
    assert_type(rekindle.checkpoint(pair, x), tuple[Tensor, int])
    assert_type(rekindle.checkpoint(scaled, x, 2.0, use_reentrant=False), Tensor)
    assert_type(rekindle.checkpoint(pair, x, context_fn=policies.keep_matmuls), tuple[Tensor, int])
    assert_type(rekindle.checkpoint(pair, x, early_stop=False, debug=True), tuple[Tensor, int])
    y: Tensor = rekindle.checkpoint(nn.Linear(2, 2), x)
    y.sum()


def a_call_takes_the_arguments_of_the_function(x: Tensor) -> None:
    rekindle.checkpoint(scaled, x)  # type: ignore[call-overload]
    rekindle.checkpoint(scaled, x, "2")  # type: ignore[call-overload]
    rekindle.checkpoint(scaled, x, 2.0, shft=1)  # type: ignore[call-arg]
    rekindle.checkpoint(3, x)  # type: ignore[call-overload]


def options_are_checked(x: Tensor) -> None:
    rekindle.checkpoint(pair, x, determinism_check="exact")  # type: ignore[call-arg]
    rekindle.checkpoint(pair, x, use_reentrant="no")  # type: ignore[call-arg]
    rekindle.checkpoint(debug="yes")  # type: ignore[call-overload]
    rekindle.offload(tier="tape")  # type: ignore[arg-type]


@rekindle.checkpoint()
def decorated(x: Tensor, scale: float, *, shift: int = 0) -> Tensor:
    return x * scale + shift


@rekindle.checkpoint
def bare(x: Tensor, scale: float) -> Tensor:
    return x * scale


@rekindle.checkpoint(determinism_check="values", preserve_rng_state=False)
def with_options(x: Tensor) -> tuple[Tensor, int]:
    return x, 1


@rekindle.offload()
def offloaded(x: Tensor, scale: float) -> Tensor:
    return x * scale


class Block(nn.Module):
    @rekindle.checkpoint()
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale


def decorated_functions_and_methods_keep_their_signatures(x: Tensor) -> None:
    assert_type(decorated(x, 2.0, shift=3), Tensor)
    assert_type(with_options(x), tuple[Tensor, int])
    assert_type(bare(x, 2.0), Tensor)
    assert_type(rekindle.checkpoint(x.sin), Tensor)
    assert_type(Block().forward(x, scale=2.0), Tensor)
    decorated(x)  # type: ignore[call-arg]
    bare(x)  # type: ignore[call-arg]
    decorated(x, 2.0, 3)  # type: ignore[call-arg]
    with_options("x")  # type: ignore[arg-type]
    Block().forward(x, "2")  # type: ignore[arg-type]
    offloaded(x)  # type: ignore[call-arg]


def apply_takes_the_spellings_of_strategies(plan: rekindle.Plan) -> None:
    assert_type(rekindle.apply(Block(), {"": "recompute"}), rekindle.Applied)
    rekindle.apply(Block(), policies.keep_matmuls)
    rekindle.apply(Block(), {"": rekindle.offload(), "*": policies.keep(), "**": "spill"})
    rekindle.apply(Block(), plan)
    rekindle.apply(Block(), {"": 3})  # type: ignore[dict-item]
    rekindle.apply("model", "keep")  # type: ignore[arg-type]
