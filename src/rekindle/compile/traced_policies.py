"""Policies while a graph is traced: torch's partitioner is told by tags on the graph's nodes."""

from typing import Any

from torch import Tensor

from rekindle.compile import node_tags
from rekindle.compile.graph_passes import install_passes
from rekindle.regions.selective import graph_location
from rekindle.regions.selective.decisions import AS_PLANNED, FOR_TORCH, Decision
from rekindle.regions.selective.eager_location import SelectiveCheckpointContext
from rekindle.regions.selective.policy_contexts import PolicyState, use_in_graphs
from rekindle.torch_private.pytrees import tree_leaves
from rekindle.torch_private.torch_checkpoint import torch_selective_contexts

_AWAY = (Decision.OFFLOAD, Decision.OFFLOAD_FREELY, Decision.SPILL, *AS_PLANNED.values())
"""Decisions that take results elsewhere."""


def contexts_in_graph(policy: Any) -> Any:
    """Torch's own contexts for a policy, in a graph that is being traced.

    The compilation runs our passes from here on: they offload what the policy marks.
    """
    install_passes()
    return torch_selective_contexts(_TracedPolicy(policy))  # type: ignore[no-untyped-call]


use_in_graphs(contexts_in_graph)


class _TracedPolicy:
    """A policy function for torch's engine, with separate state for forward and replay.

    Torch 2.13 asks after an op has run, 2.11 before: there is no node to mark by then, so that is
    done when the next op is asked about.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._states: dict[bool, PolicyState] = {False: PolicyState(), True: PolicyState()}
        self._last = Decision.OFFLOAD
        """The decision on the last result that goes elsewhere."""

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        node_tags.offload_tagged_nodes(self._last)
        counter = self._states[bool(ctx.is_recompute)]
        out = getattr(ctx, "op_output", None)
        context = counter.context(op, out, args, kwargs, ctx.is_recompute)
        context.region, context.is_compiled = self._policy, True
        name = graph_location.tensor_name(op)
        if name is not None and not ctx.is_recompute:
            self._decide_by_name(args[0], name, context)
        decision = self._policy.decide(context) or Decision.RECOMPUTE
        if decision not in _AWAY:
            return FOR_TORCH[decision]
        if out is None:  # torch 2.11
            self._last = decision
            return FOR_TORCH[Decision.OFFLOAD]
        node_tags.offload([leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)], decision)
        return FOR_TORCH[Decision.KEEP]

    def _decide_by_name(
        self, tensor: Tensor, name: str, context: SelectiveCheckpointContext
    ) -> None:
        """Tag the node of a tensor that is there already, as the policy decides on its name."""
        decision = self._policy.decide_named(name, context)
        if decision is not None and decision is not Decision.RECOMPUTE:
            node_tags.keep(tensor)
        if decision in _AWAY:
            node_tags.offload([tensor], decision)
