"""What becomes of a region in compiled code that cannot be part of a graph.

Torch then runs the whole region without compiling any of it, and says nothing. Half a graph in
forward would be no better: a replay happens outside compiled code, and autograd saves other tensors
in a graph than op by op.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

from rekindle.torch_private.dynamo_frames import no_graph_inside

_told: set[tuple[str, str]] = set()
"""Regions that were told of, each with the place where the graph broke."""


@no_graph_inside
def run_outside_graphs(region: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a region with nothing of it compiled, and say why; once for each place."""
    broken = _last_break()
    if broken is not None:
        place, why = broken
        name = getattr(region, "__qualname__", type(region).__qualname__)
        if (name, place) not in _told:
            _told.add((name, place))
            warnings.warn(
                f"The region {name} is called in compiled code, but nothing of it is compiled: "
                f"the graph breaks at {place}: {why}. Gradients are the same. Mend that line, or "
                "move it out of the region; with torch.compile(..., fullgraph=True) it is an error",
                stacklevel=3,
            )
    return run(*args, **kwargs)


def _last_break() -> tuple[str, str] | None:
    """Where the last graph broke, and why. No public form; tried on torch 2.11 and 2.13."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    for reason in reversed(dynamo.graph_break_reasons if dynamo is not None else []):
        if reason.user_stack:
            line = reason.user_stack[-1]
            place = f'File "{line.filename}", line {line.lineno}, in {line.name}'
            return place, reason.reason.strip().splitlines()[0]
    return None
