"""Runs a region in compiled code that cannot be part of a graph, and warns of it.

Torch runs such a region without compiling any of it, and without a warning. Half a graph in
forward would be no better: a replay happens outside compiled code, and autograd saves other tensors
in a graph than op by op.
"""

import warnings
from collections.abc import Callable
from typing import Any

from rekindle.torch_private.dynamo_frames import no_graph_inside
from rekindle.torch_private.dynamo_tracing import last_graph_break

warned: set[tuple[str, str]] = set()
"""Regions that were warned of, each with the place where the graph broke."""


@no_graph_inside
def run_outside_graphs(region: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a region with nothing of it compiled, and warn of the graph break once per place."""
    broken = last_graph_break()
    if broken is not None:
        place, why = broken
        name = getattr(region, "__qualname__", type(region).__qualname__)
        if (name, place) not in warned:
            warned.add((name, place))
            warnings.warn(
                f"The region {name} is called in compiled code, but nothing of it is compiled: "
                f"the graph breaks at {place}: {why}. Gradients are the same. Mend that line, or "
                "move it out of the region; with torch.compile(..., fullgraph=True) it is an error",
                stacklevel=3,
            )
    return run(*args, **kwargs)
