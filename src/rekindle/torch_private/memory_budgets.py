"""Torch's partitioner of graphs at a memory budget: a share of what it would save without one.

Note [Random numbers at a budget]. Below its default, the partitioner may have the backward draw
random numbers that the forward drew (pytorch#190758), and a dropout mask differs. It takes nodes
for ones that may be recomputed in two places: its solver does so with all that a budget has no room
for, and with what a compiler makes of random ops, such as inductor's seeds. So the solver is given
the other nodes alone, and a pass over inductor's graphs marks the seeds as saved.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from rekindle.torch_private.torch_checkpoint import CheckpointPolicy

_LEAST = 1e-4
"""The smallest budget that the partitioner solves for: at 0 it saves inputs alone, whatever the
marks and the solver say."""
_VERSION = "rekindle 1"
"""Part of the keys of torch's caches of graphs."""


@contextmanager
def memory_budget(budget: float) -> Iterator[None]:
    """Inside, graphs are partitioned at a budget from 0 to 1: Note [Random numbers at a budget].

    Tried on torch 2.11 and 2.13. Goes when the setting is documented, and leaves random ops alone.
    """
    from torch._functorch import config  # noqa: PLC0415 (slow to import)
    from torch._inductor import config as inductor_config  # noqa: PLC0415 (slow to import)

    marks = _classes().MarksRandomOps(inductor_config.joint_custom_post_pass)
    with (
        config.patch(
            activation_memory_budget=max(budget, _LEAST),
            activation_memory_budget_solver=_classes().SavesRandomOps(),
        ),
        inductor_config.patch(joint_custom_post_pass=marks),
    ):
        yield


class _Classes:
    """Subclasses of torch's, which are slow to import."""

    def __init__(self) -> None:
        from torch._inductor import custom_graph_pass as torchs  # noqa: PLC0415 (slow)

        class SavesRandomOps(torchs.CustomKnapsackSolver):
            """Torch's default solver, which is not asked about nodes that draw."""

            def __call__(
                self, memory: list[float], _graph: Any, room: float, _info: Any, nodes: list[Any]
            ) -> tuple[list[int], list[int]]:
                return _solve(memory, room, nodes)

            def uuid(self) -> str:
                return _VERSION

        class MarksRandomOps(torchs.CustomGraphPass):
            """Runs the passes that a user has set, then marks nodes that draw as saved."""

            def __init__(self, before: Any) -> None:
                several = isinstance(before, list | tuple)
                self._before = [] if before is None else list(before) if several else [before]

            def __call__(self, graph: Any) -> None:
                for each in self._before:
                    each(graph)
                for node in graph.nodes:
                    if _draws(node):
                        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

            def uuid(self) -> Any:
                keys = [each.uuid() if hasattr(each, "uuid") else None for each in self._before]
                return None if None in keys else (_VERSION, *keys)

        self.SavesRandomOps = SavesRandomOps
        self.MarksRandomOps = MarksRandomOps


_classes: Callable[[], _Classes] = cache(_Classes)


def _solve(memory: list[float], room: float, nodes: list[Any]) -> tuple[list[int], list[int]]:
    """Indices of the nodes whose results are saved, and of those that are recomputed."""
    from torch._functorch._activation_checkpointing.knapsack import dp_knapsack  # noqa: PLC0415
    from torch._functorch.partitioners import estimate_runtime  # noqa: PLC0415 (slow to import)

    drawing = [i for i, node in enumerate(nodes) if _draws(node)]
    others = [i for i in range(len(nodes)) if i not in drawing]
    left = max(room - sum(memory[i] for i in drawing), 0.0)
    costs = [estimate_runtime(nodes[i]) for i in others]
    _, saved, recomputed = dp_knapsack([memory[i] for i in others], costs, left)
    return drawing + [others[i] for i in saved], [others[i] for i in recomputed]


def _draws(node: Any) -> bool:
    """True if a node draws random numbers, or seeds that others draw by."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
