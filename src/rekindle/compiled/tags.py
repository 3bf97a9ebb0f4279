"""Fates on the nodes of a graph, where torch's partitioner and its offload pass read them.

Note [Offload in a graph]. Torch's pass moves the saved results that are marked, by copies on the
stream that computes: it waits for them. It is off unless a setting says otherwise, so that is on
from the first mark until the compilation ends. Of the pass's two forms this is the plain one: the
other, with a stream of its own, frees the storage of what it has moved, also when a view of it is
an output of the graph or the backward runs again.
"""

from typing import Any

import torch
from torch import Tensor

from rekindle.compiled.handover import CheckpointPolicy


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


def offload(tensors: list[Tensor]) -> None:
    """Have results sent to host memory and back: Note [Offload in a graph]."""
    for tensor in tensors:
        node = node_of(tensor) if can_go(tensor) else None
        if node is not None:
            node.meta["should_offload"] = True
            _run_torchs_pass()


def offload_what_was_marked() -> None:
    """Do so for the nodes that were tagged to be: by torch 2.11, which asks before an op runs."""
    proxies = _proxies()
    for node in reversed(proxies.tracer.graph.nodes) if proxies is not None else ():
        if node.meta.get("recompute") is CheckpointPolicy.MUST_CPU_OFFLOAD:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            made = node.meta.get("val")
            if isinstance(made, Tensor) and can_go(made):
                node.meta["should_offload"] = True
                _run_torchs_pass()


def can_go(tensor: Tensor) -> bool:
    """Whether a tensor is not in host memory anyway, and comes back from there with its strides."""
    return is_away(tensor) and tensor.is_contiguous()


def is_away(tensor: Tensor) -> bool:
    """Whether a tensor is not in host memory."""
    return tensor.device.type != "cpu"


_patches: list[Any] = []
"""The setting that is changed while something is compiled."""


def _run_torchs_pass() -> None:
    """Have this compilation run torch's pass. No public form; tried on torch 2.11 and 2.13."""
    from torch._dynamo.callback import callback_handler  # noqa: PLC0415
    from torch._functorch import config  # noqa: PLC0415

    is_compiled = torch._guards.CompileContext.try_get() is not None
    if _patches or not is_compiled or config.enable_activation_offloading:
        return
    patch = config.patch(
        enable_activation_offloading=True, activation_offload_separate_stream=False
    )
    patch.__enter__()
    _patches.append(patch)
    if _put_back not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_put_back)


def _put_back(_: Any) -> None:
    while _patches:
        _patches.pop().__exit__(None, None, None)
