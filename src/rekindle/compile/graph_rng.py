"""Random numbers of a region under a backend that runs the graph op by op, as `"eager"` does.

Elsewhere the partitioner sees to it that a replay draws what the forward drew. There, torch runs
the region's graph by its own eager engine with no random state preserved (all regions in torch
2.13, those with a policy in 2.11), and a dropout has another mask in backward.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self

import torch

from rekindle.torch_private.dynamo_tracing import called_while_tracing, traces_for_eager_backend

runs_op_by_op = called_while_tracing(traces_for_eager_backend)
"""Asked by Dynamo, as a constant: true if the graph is for the backend `"eager"`."""


def with_rng(context_fn: Callable[[], Any]) -> tuple["_ForwardContext", "_ReplayContext"]:
    """A region's contexts, with a replay that draws the random numbers of the forward."""
    forward, replay = context_fn()
    first = _ForwardContext(forward)
    return first, _ReplayContext(replay, first)


class _ForwardContext:
    """The context of a forward, which also takes the random state."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner
        self.states: list[torch.Tensor] = []
        self.ac_graph_id: Any = None

    def __enter__(self) -> Self:
        self.states = _states()
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> bool | None:
        return self._inner.__exit__(*error)  # type: ignore[arg-type]


class _ReplayContext:
    """The context of a replay, which draws from the forward's random state."""

    def __init__(self, inner: AbstractContextManager[Any], forward: _ForwardContext) -> None:
        self._inner = inner
        self._forward = forward
        self._before: list[torch.Tensor] = []

    def __enter__(self) -> Self:
        self._before = _states()
        _set_states(self._forward.states)
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> bool | None:
        ended = self._inner.__exit__(*error)  # type: ignore[arg-type]
        _set_states(self._before)
        return ended


def _states() -> list[torch.Tensor]:
    """The random states of the CPU and of every CUDA device in use."""
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_devices]


def _set_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if states[1:]:
        torch.cuda.set_rng_state_all(states[1:])
