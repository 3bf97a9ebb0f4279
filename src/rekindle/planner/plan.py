"""A plan: one option for each block, as a value. Saved as JSON, with no code in it."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from rekindle.modules.blocks import unwrapped_blocks
from rekindle.modules.unwrapping import class_name, places
from rekindle.planner import json_files
from rekindle.planner.candidate_to_strategy import what_of
from rekindle.planner.json_schema import Inconsistency
from rekindle.planner.types import Nearby, Option, twice
from rekindle.policies import Policy
from rekindle.strategy import SavedIndices


@dataclass(frozen=True)
class Plan:
    """What becomes of the activations of each block, and what that leads to.

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
    """The same without a plan: predicted, or measured where `fit` ran such a step."""
    gap: float
    """How far from the best the time may be, as a share."""
    peak_at: str
    blocks: tuple[tuple[str, str, Option], ...]
    """Path, class and option of each block, in the order of the forward."""
    measured_peak: int | None = None
    measured_time: float | None = None
    less: Nearby | None = None
    """What a little less memory would cost."""
    more: Nearby | None = None
    """What a little more would save."""
    inputs: tuple[tuple[int, ...], ...] = ()
    """The shapes that the model is called with, if they are known."""
    unused: tuple[str, ...] = ()
    """Blocks that the step did not run: should another one run them, they are recomputed."""
    planning_peak: int | None = None
    """Bytes that planning itself peaked at; the step that tries the plan out is `measured_peak`."""
    verified: str | None = None
    """What `fit` found of the gradients under the plan; None if they were not compared."""

    def fates(self, model: nn.Module) -> Mapping[str, str | Policy | SavedIndices]:
        """What each block of a model is given; an error if the plan is for another one."""
        if self.model not in (class_name(model), type(model).__name__):
            raise ValueError(
                f"The plan is for a {self.model}, but the model is a {class_name(model)}"
            )
        where = self.places(model)
        for path, kind, _ in self.blocks:
            block = model.get_submodule(where[path]) if path in where else None
            found = "nothing" if block is None else class_name(block)
            if block is None or kind not in (found, type(block).__name__):
                raise ValueError(f"The plan has a {kind} at {path!r}, but the model has {found}")
        planned = {path for path, _, _ in self.blocks} | set(self.unused)
        blocks = unwrapped_blocks(model)
        unplanned = [path for path in blocks if path not in planned]
        if unplanned and planned & set(blocks):
            raise ValueError(f"The model has a block that the plan has not: {unplanned[0]!r}")
        skipped = () if self.keeps_all else (path for path in self.unused if path in where)
        fates = {where[path]: what_of(option) for path, _, option in self.blocks}
        return {**{where[path]: "recompute" for path in skipped}, **fates}

    def places(self, model: nn.Module) -> dict[str, str]:
        """Where a model has what the plan names: by the plan's path, the model's own.

        The plan's has no wrappers in it, but in a file of an older rekindle.
        """
        own = {path: path for path, _ in model.named_modules(remove_duplicate=False)}
        return {**own, **places(model)}

    def stand_on(self, model: nn.Module) -> None:
        """See to it that a model that runs by the plan says so when it is called with more."""
        from rekindle.planner.runtime import stand  # it knows plans  # noqa: PLC0415

        stand(self, model)

    def inconsistencies(self) -> Iterator[Inconsistency]:
        """What cannot be, of fields that are each of the right type."""
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
        yield from twice(self.unused, set(kinds))
        if (self.measured_peak is None) != (self.measured_time is None):
            yield "measured_time", "should be there if, and only if, measured_peak is"

    @property
    def keeps_all(self) -> bool:
        """Whether the model fits as it is: every block keeps what plain autograd keeps."""
        return all(option.fate == "keep" for _, _, option in self.blocks)

    @property
    def offloads(self) -> bool:
        """Whether anything goes to host memory or disk."""
        return any(option.offloaded for _, _, option in self.blocks)

    def measured(self, peak: int, seconds: float) -> "Plan":
        """The plan, with what a step really took: a plain one takes no longer than that."""
        plain = min(self.plain_time, seconds)
        return replace(self, measured_peak=peak, measured_time=seconds, plain_time=plain)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        json_files.save(self, "plan", path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read what `save` wrote."""
        return json_files.load(cls, "plan", path)

    def __str__(self) -> str:
        from rekindle.report.text import format_plan  # noqa: PLC0415

        return format_plan(self)
