"""Debug: the ops of a forward and of its replay, and where the two part."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rekindle.observation import OpMode
from rekindle.regions.errors import call_sites
from rekindle.torch_private.pytrees import tree_leaves
from rekindle.torch_private.tensor_identity import shape_of

_CONTEXT = 2
"""How many ops that still agree are shown before the first that does not."""
_SHOWN = 3
"""How many ops are shown from there on."""


@dataclass(frozen=True)
class Op:
    """One op that ran: its name, what it made, and where."""

    name: str
    made: str
    site: call_sites.RawSite

    def same_as(self, other: "Op") -> bool:
        return self.name == other.name and self.made == other.made

    def __str__(self) -> str:
        return f"{self.name} → {self.made}"


class OpTrace:
    """Two op sequences of one region, to be compared when something is wrong."""

    def __init__(self) -> None:
        self.ran: list[Op] = []
        self.replayed: list[Op] = []

    def forward(self) -> "_OpTraceMode":
        """A context that records the ops of the forward."""
        return _OpTraceMode(self.ran)

    def replay(self) -> "_OpTraceMode":
        """A context that records the ops of the replay."""
        self.replayed.clear()
        return _OpTraceMode(self.replayed)


def format_diff(trace: OpTrace) -> str:
    """The two sequences where they part, and nothing else."""
    ran, replayed = trace.ran, trace.replayed
    part = next(
        (i for i, (a, b) in enumerate(zip(ran, replayed, strict=False)) if not a.same_as(b)),
        min(len(ran), len(replayed)),
    )
    summary = (
        f"Ops: {len(ran)} in forward, {len(replayed)} in replay until it stopped; "
        f"the first {part} are the same."
    )
    if part == len(ran) == len(replayed):
        return summary
    lines = [summary, *(f"    {op}" for op in ran[max(0, part - _CONTEXT) : part])]
    for mark, ops in (("-", ran), ("+", replayed)):
        shown = ops[part : part + _SHOWN]
        lines += [f"  {mark} {op}    [{call_sites.look_up(op.site)}]" for op in shown] or [
            f"  {mark} (nothing more)"
        ]
    lines.append("  (- forward, + replay)")
    return "\n".join(lines)


class _OpTraceMode(OpMode):
    """Appends each op that reaches the dispatcher to a list."""

    def __init__(self, ops: list[Op]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops = ops

    def saw(self, op: Any, made: Any) -> None:
        shown = ", ".join(map(describe, tree_leaves(made)))
        self._ops.append(Op(str(op), shown or "nothing", call_sites.record(3)))


def describe(value: Any) -> str:
    """A tensor as a person would write it: dtype, shape, device."""
    if not isinstance(value, Tensor):
        return repr(value)
    return meta(value.dtype, shape_of(value), value.device)


def meta(dtype: torch.dtype, shape: torch.Size, device: torch.device) -> str:
    """Dtype, shape and device, as `describe` writes them for a tensor."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} {device}"
