"""Decisions on the nodes of a graph, where torch's partitioner and our offload pass read them."""

from typing import Any

import torch
from torch import Tensor

from rekindle.compile.graph_passes import run_our_passes
from rekindle.regions.selective.decisions import Decision
from rekindle.torch_private.torch_checkpoint import CheckpointPolicy

FATE = "rekindle_fate"
"""Under which a node's `meta` has the fate of what it makes."""


def _proxies() -> Any:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # noqa: PLC0415 (slow to import)

    return get_proxy_mode()


def node_of(tensor: Tensor) -> Any:
    """The node that makes a tensor of the trace, or None. Tried on torch 2.11 and 2.13."""
    from torch._subclasses.functional_tensor import FunctionalTensor  # noqa: PLC0415
    from torch.fx.experimental.proxy_tensor import get_proxy_slot  # noqa: PLC0415

    proxies = _proxies()
    if proxies is None:
        return None
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    slot = get_proxy_slot(tensor, proxies.tracer, None)
    return None if slot is None else slot.proxy.node


def keep(tensor: Tensor) -> None:
    """Have a result kept that is there already."""
    node = node_of(tensor)
    if node is not None:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def offload(tensors: list[Tensor], fate: Decision) -> None:
    """Have results sent away and brought back: Note [Offload in a graph]."""
    for tensor in tensors:
        node = node_of(tensor) if can_go(tensor, fate) else None
        if node is not None:
            _mark(node, fate)


def offload_what_was_marked(fate: Decision) -> None:
    """Do so for the nodes that were tagged to be: by torch 2.11, which asks before an op runs."""
    proxies = _proxies()
    for node in reversed(proxies.tracer.graph.nodes) if proxies is not None else ():
        if node.meta.get("recompute") is CheckpointPolicy.MUST_CPU_OFFLOAD:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            made = node.meta.get("val")
            if isinstance(made, Tensor) and can_go(made, fate):
                _mark(node, fate)


def can_go(tensor: Tensor, fate: Decision) -> bool:
    """Whether a tensor is not in host memory anyway, unless it is to go to disk."""
    return is_away(tensor) or fate is Decision.SPILL


def is_away(tensor: Tensor) -> bool:
    """Whether a tensor is not in host memory."""
    return tensor.device.type != "cpu"


def _mark(node: Any, fate: Decision) -> None:
    node.meta[FATE] = fate
    run_our_passes()
