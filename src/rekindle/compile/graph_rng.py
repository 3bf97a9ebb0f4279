"""Random numbers of a region under a backend that runs the graph op by op, as `"eager"` does.

Elsewhere the partitioner sees to it that a replay draws what the forward drew. There, torch runs
the region's graph by its own eager engine with no random state preserved (all regions in torch
2.13, those with a policy in 2.11), and a dropout has another mask in backward.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self

import torch


def runs_op_by_op() -> bool:
    """Whether what is being traced is for the backend `"eager"`: asked by Dynamo, as a constant.

    No public form; tried on torch 2.11 and 2.13.
    """
    from torch._dynamo.backends.debugging import eager  # noqa: PLC0415 (slow to import)
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415

    backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    while backend is not None and backend is not eager:
        around = getattr(backend, "_torchdynamo_orig_backend", None)
        backend = around or getattr(backend, "compiler_fn", None)
    return backend is eager


runs_op_by_op._dynamo_marked_constant = True  # type: ignore[attr-defined]


def with_rng(context_fn: Callable[[], Any]) -> tuple["_Forward", "_Replay"]:
    """The contexts of a region, around which the replay draws what the forward drew."""
    forward, replay = context_fn()
    first = _Forward(forward)
    return first, _Replay(replay, first)


class _Forward:
    """Notes the random state, and enters the forward's own context."""

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


class _Replay:
    """Draws from that state, and leaves the random state as it was."""

    def __init__(self, inner: AbstractContextManager[Any], forward: _Forward) -> None:
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
