"""An explanation of a step's memory, as values: frozen, printed, saved as JSON.

```
model + batch ─record_step─▶ StepRecord ─summarize─▶ Summary ─┐
              ─profile_model─▶ Profile ─changes─▶ Changes ────┴─▶ Explanation
```

Nothing here imports torch.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from rekindle.planner import json_files
from rekindle.planner.as_html import as_html
from rekindle.planner.as_page import OtherSteps, PageRequest, as_page
from rekindle.planner.as_text import as_text
from rekindle.planner.json_schema import NOT_SAVED, Difference, Inconsistency
from rekindle.planner.types import LossSource, Profile, Scalar, known_scalars
from rekindle.sizes import format_bytes

Phase: TypeAlias = Literal["forward", "backward", "replay"]
"""The part of a step in which an op runs; a replay is a forward that runs again in the backward."""

Source: TypeAlias = Literal["device", "fake tensors", "recompute"]
"""The step that was recorded: as it is, on its device; as it is, on fake tensors; or on its device
with every block recomputed."""

KINDS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer",
    "batch",
    "other",
    "activations",
    "logits",
    "replay",
    "workspace",
)
"""The kinds of memory, in the order in which bytes by kind are given.

Gradients are those of parameters, which count all the time; `other` is what else is allocated on
the device. Activations are made in the forward and alive when the backward begins, or saved by
autograd. Logits are what a log-softmax reads, what it is made from by casts and the like, and the
gradients of both. A replay makes results of the forward again. Workspace is all the rest: results
that the forward frees, and gradients on their way through the backward."""


@dataclass(frozen=True)
class Share:
    """The bytes of one kind, module, op or line of code."""

    name: str
    about: str
    """A module's class, or a line's source text."""
    at_peak: int
    """Bytes at the moment of the step's peak."""
    highest: int
    """Bytes at the moment at which this share is largest."""
    kinds: tuple[int, ...]
    """The bytes at the peak by kind, in the order of `KINDS`."""


@dataclass(frozen=True)
class MemoryPoint:
    """The memory of the step at one moment."""

    event: int
    """The number of storages that were made or freed before."""
    seconds: float | None
    """Estimated time since the step began; None where ops are not timed."""
    phase: Phase
    module: str
    """The path of the module whose op ran last."""
    op: str
    nbytes: int
    kinds: tuple[int, ...]
    """The bytes by kind, in the order of `KINDS`."""


@dataclass(frozen=True)
class SavedActivation:
    """Storages that autograd saves, alike but for the number in their module's path."""

    shape: tuple[int, ...]
    dtype: str
    op: str
    """The op that made them."""
    modules: tuple[str, ...]
    """The paths of the modules in which they were made, one for each storage."""
    line: str
    """File and line of the user's code."""
    source: str
    nbytes: int
    """Bytes of all of them."""
    at_peak: int
    """Bytes of those that are alive at the step's peak."""
    needed_by: tuple[str, ...]
    """The backward nodes that read them, with the modules of their forward."""

    @property
    def count(self) -> int:
        """The number of storages."""
        return len(self.modules)


class Allocation(NamedTuple):
    """One storage that the step made."""

    nbytes: int
    kind: str
    op: str
    phase: Phase
    module: str
    line: str
    """File and line of the user's code; empty if it is not known."""
    function: str
    made: int
    """The number of the event in which it was made: events are storages made, or freed."""
    freed: int | None
    """The number of the event in which it was freed; None if it outlives the step."""


@dataclass(frozen=True)
class Change:
    """A change to the training step, with what it is predicted to save and to cost."""

    name: str
    how: str
    """The code, or the words, by which it is made."""
    peak: int
    """The predicted peak of the step with the change."""
    saved: Difference
    """Bytes by which the peak is lower than without the change."""
    seconds: float | None
    """The predicted time of the step with the change; None if nothing predicts it."""
    peak_at: str
    """The moment of the peak with the change."""
    note: str = ""
    """A remark: what is done, that the figures are estimates, or why the change does not help."""
    same_step: bool = True
    """True if gradients, the optimizer's step and the batch stay as they are."""
    fits: bool | None = None
    """True if the peak is within the memory of the device; None where that is not known."""


@dataclass(frozen=True)
class Explanation:
    """An account of a training step's memory: at its peak, and over its whole timeline.

    Bytes are exact: those that the planner's meter counts. Each storage counts once, at the op that
    made it. Shares of modules include the modules inside them.
    """

    model: str
    device: str
    batch: str
    loss: LossSource
    source: Source
    peak: int
    """The highest point of the step, with all that is there all the time."""
    peak_at: str
    """The phase, module, op and line of the op that ran at the peak."""
    static_bytes: int
    """Bytes of parameters, buffers, gradients, optimizer state and batch: there all the time."""
    device_bytes: int | None
    """The memory of the device; None where that is not known."""
    seconds: float
    """The predicted time of a step as it is."""
    kinds: tuple[Share, ...]
    modules: tuple[Share, ...]
    """The modules, in the order of the model's tree; "" is the whole step."""
    ops: tuple[Share, ...]
    lines: tuple[Share, ...]
    timeline: tuple[MemoryPoint, ...]
    """At most some hundred moments; of those left out, none is higher than its neighbours here."""
    saved: tuple[SavedActivation, ...]
    """The largest saved tensors, those with most bytes first."""
    changes: tuple[Change, ...]
    """The most useful changes, the best first."""
    others: tuple[Change, ...]
    """Changes that help, but of which another one does as much at less cost, or that help less."""
    unhelpful: tuple[Change, ...]
    """Changes that do not help, with the reason."""
    kind_names: tuple[str, ...] = KINDS
    """The names of the kinds, in the order in which bytes by kind are given."""
    profile: Profile | None = field(default=None, compare=False, repr=False, metadata=NOT_SAVED)
    """The profile of the same step, for reports. Files do not have it."""
    allocations: tuple[Allocation, ...] = field(
        default=(), compare=False, repr=False, metadata=NOT_SAVED
    )
    """All storages of the step, for snapshots. Files do not have them."""

    @property
    def fits(self) -> bool | None:
        """True if the step fits the memory of the device; None where that is not known."""
        return None if self.device_bytes is None else self.peak <= self.device_bytes

    def inconsistencies(self) -> Iterator[Inconsistency]:
        """Places where fields of the right types contradict each other, with what is wrong."""
        count = len(self.kind_names)
        for name in ("kinds", "modules", "ops", "lines", "timeline"):
            for i, each in enumerate(getattr(self, name)):
                if len(each.kinds) != count:
                    yield f"{name}[{i}].kinds", f"should have {count} numbers"
        if sum(each.at_peak for each in self.kinds) != self.peak:
            yield "kinds", "should add up to the peak"

    def as_dict(self) -> dict[str, Scalar]:
        """The explanation's figures as a flat dict of numbers and words, for logs.

        `activations_at_peak` and the like are bytes by kind; `best_change` is the most useful one.
        What is not known is left out.
        """
        names = ("model", "device", "batch", "loss", "source", "peak", "peak_at", "static_bytes")
        values = {name: getattr(self, name) for name in (*names, "device_bytes", "fits", "seconds")}
        values |= {f"{kind.name}_at_peak": kind.at_peak for kind in self.kinds}
        for change in self.changes[:1]:
            values |= {"best_change": change.name, "best_change_saved": change.saved}
        return known_scalars(values)

    def as_json(self) -> dict[str, Any]:
        """The explanation as plain values: all that its file has, and what a page needs."""
        return json_files.as_json(self, "explanation")

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        snapshot: str | os.PathLike[str] | None = None,
        points: int = 12,
        others: OtherSteps | None = None,
    ) -> Path:
        """Write a page of where the memory goes, and of the plans that would make it less.

        It is one file that needs nothing from elsewhere. Returns its path.

        Args:
            path: the file to write, such as `"memory.html"`.
            snapshot: a second file to write, such as `"memory.pickle"`: every storage of the step,
                for torch's page of memory snapshots (pytorch.org/memory_viz).
            points: plans to look for, from the plain peak down to the smallest that works.
            others: steps to draw beside the plans, by their names: the peak in bytes, and seconds.
        """
        return as_page(self, PageRequest(path, snapshot, points, others))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the explanation as JSON."""
        json_files.save(self, "explanation", path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Explanation":
        """Read a file that `save` wrote."""
        return json_files.load(cls, "explanation", path)

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"<Explanation of {self.model} on {self.device}: peak {format_bytes(self.peak)}>"

    def _repr_html_(self) -> str:
        return as_html(self)
