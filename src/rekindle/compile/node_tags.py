"""Decisions on the nodes of a graph, where torch's partitioner and our offload pass read them."""

from torch import Tensor

from rekindle.regions.selective.decisions import Decision
from rekindle.torch_private.fx_nodes import node_of, traced_nodes
from rekindle.torch_private.torch_checkpoint import CheckpointPolicy

DECISION = "rekindle_decision"
"""The key in a node's `meta` of the decision to offload or spill its result."""


def keep(tensor: Tensor) -> None:
    """Tag the node of a tensor that was computed already, so that torch keeps it."""
    node = node_of(tensor)
    if node is not None:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def offload(tensors: list[Tensor], decision: Decision) -> None:
    """Mark the nodes of tensors for our pass over the graphs: Note [Offload in a graph]."""
    for tensor in tensors:
        node = node_of(tensor) if can_go(tensor, decision) else None
        if node is not None:
            node.meta[DECISION] = decision


def offload_tagged_nodes(decision: Decision) -> None:
    """Mark the nodes that torch 2.11 has tagged: it asks a policy before the op has a node."""
    for node in traced_nodes():
        if node.meta.get("recompute") is CheckpointPolicy.MUST_CPU_OFFLOAD:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            made = node.meta.get("val")
            if isinstance(made, Tensor) and can_go(made, decision):
                node.meta[DECISION] = decision


def can_go(tensor: Tensor, decision: Decision) -> bool:
    """True if a tensor is not in host memory already, or is to go to disk."""
    return is_on_device(tensor) or decision is Decision.SPILL


def is_on_device(tensor: Tensor) -> bool:
    """True if a tensor is not in host memory."""
    return tensor.device.type != "cpu"
