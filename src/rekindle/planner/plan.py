"""A plan: one candidate for each block, as a value. Saved as JSON, with no code in it."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rekindle.planner import json_files
from rekindle.planner.as_html import as_html
from rekindle.planner.as_page import OtherSteps, PageRequest, as_page
from rekindle.planner.as_text import as_text
from rekindle.planner.json_schema import NOT_SAVED, Inconsistency
from rekindle.planner.rest import Heads
from rekindle.planner.types import (
    Candidate,
    Nearby,
    Profile,
    Scalar,
    known_scalars,
    repeated_paths,
)
from rekindle.sizes import format_bytes
from rekindle.strategy import Keep


@dataclass(frozen=True)
class Plan:
    """A strategy for the activations of each block, with the peak and the time of a step.

    Peaks are in bytes of the device's memory: on a GPU what torch's allocator gives out, on a CPU
    the tensors that ops return, without scratch inside an op and random states of regions.
    """

    model: str
    batch: str
    device: str
    budget: int
    """Bytes that a step may peak at."""
    predicted_peak: int
    predicted_time: float
    """Seconds a step."""
    plain_peak: int
    plain_time: float
    """Seconds of a step without a plan; as `plain_peak`, measured if `fit` ran such a step."""
    gap: float
    """How far from the best the time may be, as a share."""
    peak_at: str
    blocks: tuple[tuple[str, str, Candidate], ...]
    """Path, class and candidate of each block, in the order of the forward."""
    measured_peak: int | None = None
    measured_time: float | None = None
    less: Nearby | None = None
    """A step within a little less memory."""
    more: Nearby | None = None
    """A step within a little more."""
    inputs: tuple[tuple[int, ...], ...] = ()
    """The shapes that the model is called with, if they are known."""
    unused: tuple[str, ...] = ()
    """Blocks that the step did not run: should another one run them, they are recomputed."""
    left_out: tuple[str, ...] = ()
    """Modules that repeat and are left as they are, because other blocks were named."""
    compiled: tuple[str, ...] = ()
    """Blocks that are compiled, each by itself; the plan is for them as compiled code."""
    planning_peak: int | None = None
    """Bytes that planning itself peaked at; the step that tries the plan out is `measured_peak`."""
    verified: str | None = None
    """The outcome of `fit` comparing gradients under the plan; None if it did not."""
    heads: Heads = ()
    """Path, class and strategy of each head that does not run as without a plan."""
    profile: Profile | None = field(default=None, compare=False, repr=False, metadata=NOT_SAVED)
    """The profile that the plan is by, for reports. Files do not have it, so a plan that was loaded
    has none."""

    def inconsistencies(self) -> Iterator[Inconsistency]:
        """Places where fields of the right types contradict each other, with what is wrong."""
        if not self.budget:
            yield "budget", "should be above 0"
        if not 0 <= self.gap <= 1:
            yield "gap", f"should be a share, from 0 to 1, but is {self.gap}"
        if not self.blocks:
            yield "blocks", "should name a block, but is empty"
        kinds: dict[str, str] = {}
        for i, (path, kind, _) in enumerate(self.blocks):
            if kinds.setdefault(path, kind) != kind:
                yield f"blocks[{i}]", f"has a {kind} at {path!r}, where a {kinds[path]} is, too"
        yield from repeated_paths(self.unused, set(kinds))
        for i, (path, _, _) in enumerate(self.heads):
            if path in kinds:
                yield f"heads[{i}]", f"names {path!r}, which is a block"
        for i, path in enumerate(self.compiled):
            if path not in kinds:
                yield f"compiled[{i}]", f"names {path!r}, which is not among the blocks"
        if (self.measured_peak is None) != (self.measured_time is None):
            yield "measured_time", "should be there if, and only if, measured_peak is"

    @property
    def keeps_all(self) -> bool:
        """True if the model fits as it is: every block keeps what plain autograd keeps."""
        keeps = all(candidate.strategy == Keep() for _, _, candidate in self.blocks)
        return keeps and not self.heads

    @property
    def offloads(self) -> bool:
        """True if any results are moved to host memory or disk."""
        return any(candidate.tier is not None for _, _, candidate in self.blocks)

    def measured(self, peak: int, seconds: float) -> "Plan":
        """The plan with the measured peak and time of a step; a plain step is no slower."""
        plain = min(self.plain_time, seconds)
        return replace(self, measured_peak=peak, measured_time=seconds, plain_time=plain)

    @property
    def slowdown(self) -> float:
        """The predicted time as a multiple of that of a step without a plan; never below 1."""
        return max(self.predicted_time / self.plain_time, 1.0) if self.plain_time else 1.0

    def count_blocks(self) -> dict[str, int]:
        """The number of blocks by what they do, such as `{"keep": 8, "keep+recompute": 4}`."""
        counts = Counter("+".join(candidate.words) for _, _, candidate in self.blocks)
        return dict(sorted(counts.items()))

    def as_dict(self) -> dict[str, Scalar]:
        """The plan's figures as a flat dict of numbers and words, for logs such as wandb's.

        Names are those of fields and properties: bytes, and seconds a step. `blocks_keep` is the
        number of blocks that keep some activations, and so on; `bytes_moved` is what all offload or
        spill. Unknown figures, such as `measured_peak` where nothing was measured, are left out.
        """
        counts = dict.fromkeys(("keep", "recompute", "offload", "spill"), 0)
        counts.update(Counter(word for _, _, each in self.blocks for word in each.words))
        return known_scalars(
            {
                **{name: getattr(self, name) for name in _LOGGED},
                "blocks": len(self.blocks),
                **{f"blocks_{word}": count for word, count in counts.items()},
                "bytes_moved": sum(candidate.bytes_moved for _, _, candidate in self.blocks),
            }
        )

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values: all that its file has."""
        return json_files.as_json(self, "plan")

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        snapshot: str | os.PathLike[str] | None = None,
        points: int = 12,
        others: OtherSteps | None = None,
        profile: Profile | None = None,
        explanation: Any = None,
    ) -> Path:
        """Write a page with the plan, and a slider over the budgets around it.

        It is one file that needs nothing from elsewhere. Returns its path.

        Args:
            path: the file to write, such as `"plan.html"`.
            snapshot: a second file to write, such as `"plan.pickle"`: the plan's predicted memory,
                for torch's page of memory snapshots (pytorch.org/memory_viz).
            points: plans to look for, from the plain peak down to the smallest that works.
            others: steps to draw beside the plans, by their names: the peak in bytes, and seconds.
            profile: the profile of a plan that was loaded from a file: without it, the page has the
                plan alone.
            explanation: what `rekindle.explain` returned, to be shown on the same page.
        """
        return as_page(self, PageRequest(path, snapshot, points, others, profile, explanation))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        json_files.save(self, "plan", path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a file that `save` wrote, of this version of rekindle or an older one."""
        return json_files.load(cls, "plan", path)

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        peak = f"{format_bytes(self.predicted_peak)} of {format_bytes(self.budget)}"
        blocks = format_choice(self)
        return f"<Plan for {self.model}: {peak}, {self.slowdown:.2f}x the time; {blocks}>"

    def _repr_html_(self) -> str:
        return as_html(self)


_LOGGED = (
    "model",
    "device",
    "batch",
    "budget",
    "predicted_peak",
    "predicted_time",
    "plain_peak",
    "plain_time",
    "slowdown",
    "measured_peak",
    "measured_time",
    "planning_peak",
    "gap",
    "peak_at",
    "keeps_all",
    "verified",
)
"""Fields and properties of a plan that logs take."""


def format_choice(plan: Plan) -> str:
    """The strategies of a plan for people: `8 keep, 4 recompute; head: rows`."""
    counts = ", ".join(f"{count} {words}" for words, count in plan.count_blocks().items())
    return "; ".join([counts, *(f"{path}: {strategy}" for path, _, strategy in plan.heads)])
