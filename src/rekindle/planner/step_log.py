"""A log of the moments of a step, which the timeline writes as it evaluates a choice."""

from dataclasses import dataclass, field
from typing import NamedTuple


class MemoryAt(NamedTuple):
    """Memory at the highest point of one moment, by its cause.

    In a log, bytes are above those before the first block.
    """

    outside: int
    """Bytes that were made outside the blocks, and are still there."""
    held: int
    """Bytes that the forwards of blocks left for their backwards."""
    cached: int
    """Bytes of casts in autocast's cache."""
    moving: int
    """Bytes on their way out, or back ahead of their use."""
    own: int
    """Bytes that are needed on top by what runs: a block, or the head and the loss."""


@dataclass
class StepLog:
    """The moments and the copies of one step: each list has a place for each block.

    `Timeline.evaluate` fills it in; `step_walk` puts it in order.
    """

    forward: list[MemoryAt] = field(default_factory=list)
    rest: MemoryAt | None = None
    """The memory between the last block's forward and its backward."""
    backward: dict[int, MemoryAt] = field(default_factory=dict)
    forward_ends: list[float] = field(default_factory=list)
    backward_begins: list[float] = field(default_factory=list)
    backward_ends: list[float] = field(default_factory=list)
    copies_out: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By place: the seconds at which its copy to host memory or disk begins, and ends."""
    copies_back: dict[int, tuple[float, float]] = field(default_factory=dict)

    def add_forward(self, memory: MemoryAt, end: float, copy: tuple[float, float] | None) -> None:
        """Note a forward: its highest point, its end, and the copy of its results."""
        if copy is not None:
            self.copies_out[len(self.forward)] = copy
        self.forward.append(memory)
        self.forward_ends.append(end)
