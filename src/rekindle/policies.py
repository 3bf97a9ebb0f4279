"""Policies as values: which results of a region's ops are kept, recomputed, offloaded or spilled.

A policy is comparable, hashable and prints as the code that makes it. Policies are joined with `|`:
the first that has something to say about an op decides, and what none speaks of is recomputed.

    from rekindle import policies
    from rekindle.policies import at, every, keep, named, offload

    rekindle.checkpoint(block, x, context_fn=policies.keep_matmuls_and_attention)
    rekindle.checkpoint(block, x, context_fn=at("mlp", offload(MATMULS)) | keep(MATMULS))
"""

from typing import Any

import rekindle.regions.selective.policy_json  # noqa: F401  (so that strategies are saved with policies)
from rekindle.regions.selective.decisions import Decision, decision_named
from rekindle.regions.selective.op_names import Op, op_of
from rekindle.regions.selective.op_sets import ATTENTION, MATMULS, REDUCTIONS, ROUTING
from rekindle.regions.selective.policy_kinds import (
    At,
    Cheap,
    Counted,
    Inputs,
    Named,
    Ops,
    Policy,
    made_before,
    of,
)

__all__ = [
    "ATTENTION",
    "MATMULS",
    "REDUCTIONS",
    "ROUTING",
    "Policy",
    "at",
    "every",
    "first",
    "keep",
    "keep_attention",
    "keep_inputs",
    "keep_matmuls",
    "keep_matmuls_and_attention",
    "keep_routing",
    "named",
    "of",
    "offload",
    "recompute",
    "recompute_cheap",
    "spill",
]


@made_before
def keep(*ops: Any) -> Policy:
    """Keep what these ops make; what every op makes, with none given.

    An op is `torch.ops.aten.mm`, which stands for all its overloads, `torch.ops.aten.mm.default`,
    its name (`"aten::mm"`), a higher-order operator, or an `autograd.Function`, which stands for
    all that its forward does. Collections of them can be given too.

    >>> import torch
    >>> keep("aten::mm") | offload(torch.ops.aten.addmm)
    keep('aten::mm') | offload('aten::addmm')
    """
    return _some(Decision.KEEP, ops)


@made_before
def recompute(*ops: Any) -> Policy:
    """Recompute what these ops make; what every op makes, with none given."""
    return _some(Decision.RECOMPUTE, ops)


@made_before
def offload(*ops: Any) -> Policy:
    """Send what these ops make to host memory; what is there already stays."""
    return _some(Decision.OFFLOAD, ops)


@made_before
def spill(*ops: Any) -> Policy:
    """Send what these ops make to disk."""
    return _some(Decision.SPILL, ops)


def _some(decision: Decision, ops: tuple[Any, ...]) -> Policy:
    return Ops(decision, _ops(ops) if ops else None)


def _ops(ops: tuple[Any, ...]) -> frozenset[Op]:
    found: list[Op] = []
    for op in ops:
        many = isinstance(op, list | tuple | set | frozenset)
        found += map(op_of, op) if many else [op_of(op)]
    return frozenset(found)


@made_before
def keep_inputs(*ops: Any) -> Policy:
    """Keep what these ops are given, where that takes no more memory than what it is made from.

    Queries and keys with rotary positions are as large as the products they come from: kept in
    their place, they need not be rotated again.

    >>> keep_inputs("aten::_scaled_dot_product_flash_attention")
    keep_inputs('aten::_scaled_dot_product_flash_attention')
    """
    return Inputs(_ops(ops))


@made_before
def at(pattern: str, policy: "Policy | str") -> Policy:
    """A policy, or a decision, for the ops that run in some modules and in what these contain.

    The pattern names parts of a module's path, with the wildcards of file names within a part:
    `"layers.*.mlp"`, `"mlp"`, `"layers.[0-3]"`. Paths begin at the outermost module that is called.

    >>> at("layers.*.mlp", "keep")
    at('layers.*.mlp', keep())
    """
    if not isinstance(pattern, str) or not pattern or "" in pattern.split("."):
        raise ValueError(f'A pattern is like "layers.*.mlp", but got {pattern!r}')
    return At(pattern, _policy(policy))


def _policy(policy: Any) -> Policy:
    return Ops(decision_named(policy), None) if isinstance(policy, str) else of(policy)


@made_before
def named(*names: str, fate: str = "keep") -> Policy:
    """A decision for the tensors and functions that were given these names by `rekindle.name`.

    >>> named("attn_out", "mlp_*", fate="offload")
    named('attn_out', 'mlp_*', fate='offload')
    """
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"named() takes the names of tensors, but got {names!r}")
    return Named(decision_named(fate), names)


@made_before
def first(n: int, policy: Policy) -> Policy:
    """A policy, for the first `n` ops of a region that it speaks of."""
    return Counted(None, _count(n), of(policy))


@made_before
def every(n: int, policy: Policy) -> Policy:
    """A policy, for every `n`-th op of a region that it speaks of, beginning with the first.

    >>> every(2, keep("aten::mm"))
    every(2, keep('aten::mm'))
    """
    return Counted(_count(n), None, of(policy))


def _count(n: Any) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"n should be a whole number from 1 on, but got {n!r}")
    return n


_SMALL = ROUTING | REDUCTIONS
keep_routing = keep(ROUTING)
"""Keep what decides the routes of a mixture of experts; a part of the policies below."""
keep_matmuls = keep(MATMULS | _SMALL)
"""Keep what matrix products and convolutions make; recompute the cheap ops between them."""
keep_attention = keep(ATTENTION | _SMALL)
"""Keep what fused attention makes."""
keep_matmuls_and_attention = keep(MATMULS | ATTENTION | _SMALL) | keep_inputs(ATTENTION)
"""Keep whatever takes compute; recompute only what memory bandwidth bounds."""
recompute_cheap = Cheap()
"""Keep all that any op makes, but for pointwise ops, casts, norms, reductions and the like."""
