"""Has a compilation run our passes over its pairs of graphs, forward and backward."""

from contextlib import AbstractContextManager
from typing import Any

from rekindle.torch_private.dynamo_tracing import called_while_tracing
from rekindle.torch_private.partitioned_graphs import (
    in_compilation,
    is_tracing_export,
    pass_over_graph_pairs,
    when_compilation_ends,
)

_installed: list[AbstractContextManager[None]] = []
"""The change to torch's partitioner, while something is compiled that has a region in it."""


@called_while_tracing
def install_passes() -> None:
    """Have the compilation that is going on run our passes, until it ends; nothing outside of one.

    Called where a region enters a graph: by Dynamo, as a constant, where a region is handed over;
    and where a policy's contexts for a graph are made, for regions that torch's own function runs.
    `torch.export` makes no pair of graphs, and does not say when it ends.
    """
    if _installed or not in_compilation() or is_tracing_export():
        return
    passes = pass_over_graph_pairs(_run_passes)
    passes.__enter__()
    _installed.append(passes)
    when_compilation_ends(_uninstall_passes)


def are_installed() -> bool:
    """True while a compilation goes on that runs our passes."""
    return bool(_installed)


def _run_passes(forward: Any, backward: Any, outputs: int) -> None:
    from rekindle.compile.changed_inputs import save_changed_inputs  # noqa: PLC0415
    from rekindle.compile.graph_offload import offload_marked  # noqa: PLC0415 (it brings ops)

    save_changed_inputs(forward, backward, outputs)
    offload_marked(forward, backward, outputs)


def _uninstall_passes(_: Any) -> None:
    while _installed:
        _installed.pop().__exit__(None, None, None)
