"""`checkpoint`, which is written in `rekindle.compile.checkpoint_call`, and its sequential form."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from rekindle.compile.checkpoint_call import checkpoint

__all__ = ["checkpoint", "checkpoint_sequential"]


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,  # noqa: A002  (torch's name)
    use_reentrant: bool = False,
    *,
    preserve_rng_state: bool = True,
) -> Any:
    """Run `functions` in a row, in `segments` parts, and checkpoint all parts but the last.

    >>> import torch, rekindle
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)])
    >>> y = rekindle.checkpoint_sequential(model, 3, torch.ones(2, 4))
    """
    steps: list[Callable[..., Any]] = list(functions)
    if not isinstance(segments, int):
        raise TypeError(f"segments should be a whole number, but got {type(segments).__name__}")
    if not 1 <= segments <= max(len(steps), 1):
        raise ValueError(f"segments should be from 1 to {len(steps)}, but got {segments}")
    size = max(len(steps) // segments, 1)
    value = input
    for start in range(0, size * (segments - 1), size):
        value = checkpoint(
            _Segment(steps[start : start + size], start // size + 1, segments),
            value,
            use_reentrant=use_reentrant,
            preserve_rng_state=preserve_rng_state,
        )
    return _Segment(steps[size * (segments - 1) :], segments, segments)(value)


class _Segment:
    """Some functions of a sequence, one after the other; errors and counts give its number."""

    def __init__(self, steps: list[Callable[..., Any]], number: int, count: int) -> None:
        self._steps = steps
        self.__qualname__ = f"segment {number} of {count}"

    def __call__(self, value: Any) -> Any:
        for step in self._steps:
            value = step(value)
        return value
