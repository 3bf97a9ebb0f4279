"""Decisions on the nodes of a graph, where torch's partitioner and our offload pass read them."""

from torch import Tensor

from rekindle.regions.selective.decisions import Decision
from rekindle.torch_private.fx_nodes import node_of, traced_nodes
from rekindle.torch_private.torch_checkpoint import CheckpointPolicy

FATE = "rekindle_fate"
"""Under which a node's `meta` has the decision of what it makes."""


def keep(tensor: Tensor) -> None:
    """Have a result kept that is there already."""
    node = node_of(tensor)
    if node is not None:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def offload(tensors: list[Tensor], decision: Decision) -> None:
    """Have results sent away and brought back: Note [Offload in a graph]."""
    for tensor in tensors:
        node = node_of(tensor) if can_go(tensor, decision) else None
        if node is not None:
            node.meta[FATE] = decision


def offload_what_was_marked(decision: Decision) -> None:
    """Do so for the nodes that were tagged to be: by torch 2.11, which asks before an op runs."""
    for node in traced_nodes():
        if node.meta.get("recompute") is CheckpointPolicy.MUST_CPU_OFFLOAD:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            made = node.meta.get("val")
            if isinstance(made, Tensor) and can_go(made, decision):
                node.meta[FATE] = decision


def can_go(tensor: Tensor, decision: Decision) -> bool:
    """Whether a tensor is not in host memory anyway, unless it is to go to disk."""
    return is_away(tensor) or decision is Decision.SPILL


def is_away(tensor: Tensor) -> bool:
    """Whether a tensor is not in host memory."""
    return tensor.device.type != "cpu"
