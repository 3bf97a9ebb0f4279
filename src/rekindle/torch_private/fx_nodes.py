"""Nodes of the graph that is being traced, or that is being run to trace it again."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor


def node_meta() -> dict[str, Any]:
    """The `meta` of the node that is being run: its op's module stack, stack trace, annotations.

    Tried on torch 2.11 and 2.13: the name has no underscore and is not documented. Goes when it is.
    """
    return torch.fx.traceback.current_meta


def runs_a_node() -> bool:
    """True if what runs is a node of a graph that Dynamo made, rather than a user's code.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    return "from_node" in torch.fx.traceback.current_meta


def annotated(custom: dict[str, Any]) -> AbstractContextManager[Any]:
    """A context that writes entries to `meta["custom"]` of the nodes that Dynamo makes inside.

    Tried on torch 2.11 and 2.13: the name has no underscore and is not documented. Goes when it is.
    """
    return torch.fx.traceback.annotate(custom)


def node_of(tensor: Tensor) -> Any:
    """The node that makes a tensor of the graph that is being traced, or None.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    from torch._subclasses.functional_tensor import FunctionalTensor  # noqa: PLC0415 (slow)
    from torch.fx.experimental.proxy_tensor import (  # noqa: PLC0415
        get_proxy_mode,
        get_proxy_slot,
    )

    proxies = get_proxy_mode()
    if proxies is None:
        return None
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    slot = get_proxy_slot(tensor, proxies.tracer, None)
    return None if slot is None else slot.proxy.node


def traced_nodes() -> Iterable[Any]:
    """The nodes of the graph that is being traced, the last first; none outside a trace.

    Tried on torch 2.11 and 2.13. Goes when torch has a public form.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # noqa: PLC0415 (slow)

    proxies = get_proxy_mode()
    return reversed(proxies.tracer.graph.nodes) if proxies is not None else ()


def saves_rng_state(node: Any) -> bool:
    """True if a node draws random numbers and saves the state from before, for its backward.

    Tried on torch 2.13. Goes when the partitioner marks such nodes in their `meta`.
    """
    from torch._prims.rng_prims import run_and_save_rng_state  # noqa: PLC0415 (for graphs only)

    return node.target is run_and_save_rng_state
