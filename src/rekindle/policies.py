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
from rekindle.regions.selective.op_names import OpSpec, op_of
from rekindle.regions.selective.op_sets import ATTENTION, MATMULS, REDUCTIONS, ROUTING
from rekindle.regions.selective.policy_kinds import (
    CheapOpsPolicy,
    CountedPolicy,
    KeepInputsPolicy,
    NamedPolicy,
    OpsPolicy,
    PathPolicy,
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
    """Keep the results of these ops; of every op, with none given.

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
    """Recompute the results of these ops; of every op, with none given."""
    return _some(Decision.RECOMPUTE, ops)


@made_before
def offload(*ops: Any) -> Policy:
    """Copy the results of these ops to host memory; results that are there already stay."""
    return _some(Decision.OFFLOAD, ops)


@made_before
def spill(*ops: Any) -> Policy:
    """Copy the results of these ops to disk."""
    return _some(Decision.SPILL, ops)


def _some(decision: Decision, ops: tuple[Any, ...]) -> Policy:
    return OpsPolicy(decision, _ops(ops) if ops else None)


def _ops(ops: tuple[Any, ...]) -> frozenset[OpSpec]:
    found: list[OpSpec] = []
    for op in ops:
        many = isinstance(op, list | tuple | set | frozenset)
        found += map(op_of, op) if many else [op_of(op)]
    return frozenset(found)


@made_before
def keep_inputs(*ops: Any) -> Policy:
    """Keep the arguments of these ops, where they take no more memory than their sources.

    Queries and keys with rotary positions are as large as the products they come from: kept in
    their place, they need not be rotated again.

    >>> keep_inputs("aten::_scaled_dot_product_flash_attention")
    keep_inputs('aten::_scaled_dot_product_flash_attention')
    """
    return KeepInputsPolicy(_ops(ops))


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
    return PathPolicy(pattern, _policy(policy))


def _policy(policy: Any) -> Policy:
    return OpsPolicy(decision_named(policy), None) if isinstance(policy, str) else of(policy)


@made_before
def named(*names: str, fate: str = "keep") -> Policy:
    """A decision for the tensors and functions that were given these names by `rekindle.name`.

    >>> named("attn_out", "mlp_*", fate="offload")
    named('attn_out', 'mlp_*', fate='offload')
    """
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"named() takes the names of tensors, but got {names!r}")
    return NamedPolicy(decision_named(fate), names)


@made_before
def first(n: int, policy: Policy) -> Policy:
    """A policy for the first `n` ops of a region that it has an opinion on."""
    return CountedPolicy(None, _count(n), of(policy))


@made_before
def every(n: int, policy: Policy) -> Policy:
    """A policy for every `n`-th op of a region that it has an opinion on, from the first on.

    >>> every(2, keep("aten::mm"))
    every(2, keep('aten::mm'))
    """
    return CountedPolicy(_count(n), None, of(policy))


def _count(n: Any) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"n should be a whole number from 1 on, but got {n!r}")
    return n


_SMALL = ROUTING | REDUCTIONS
keep_routing = keep(ROUTING)
"""Keep the results that route tokens in a mixture of experts; part of the policies below."""
keep_matmuls = keep(MATMULS | _SMALL)
"""Keep the results of matrix products and convolutions; recompute the cheap ops between."""
keep_attention = keep(ATTENTION | _SMALL)
"""Keep the results of fused attention."""
keep_matmuls_and_attention = keep(MATMULS | ATTENTION | _SMALL) | keep_inputs(ATTENTION)
"""Keep every result that takes compute; recompute only what memory bandwidth bounds."""
recompute_cheap = CheapOpsPolicy()
"""Keep every result but those of pointwise ops, casts, norms, reductions and the like."""
