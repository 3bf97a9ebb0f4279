"""Values that pass between tracing, measuring, solving and applying: frozen, printed, compared.

```
BlockTrace ─candidates─▶ Candidate ─measure─▶ Profile ─solve─▶ Solution ─▶ Plan
```

A `Plan` has a file of its own, `plan.py`. Nothing here imports torch.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from rekindle.modules.patterns import generalized
from rekindle.planner import json_files
from rekindle.planner.as_html import as_html
from rekindle.planner.as_page import OtherSteps, PageRequest, as_page
from rekindle.planner.as_text import as_text
from rekindle.planner.json_schema import Difference, Inconsistency
from rekindle.planner.rest import FIELDS, Heads, Rest, is_exact
from rekindle.sizes import format_bytes, format_count
from rekindle.strategy import (
    WORD_OF_TIER,
    Compiled,
    Keep,
    NumberedOps,
    OpAddress,
    PlannedOps,
    Recompute,
    RecomputeInTiles,
    SavedIndices,
    Selective,
    Strategy,
    TierName,
    is_exact_strategy,
)

LossSource: TypeAlias = Literal["model", "given", "none"]
"""Where a step's loss comes from: the model, or the function that is the step, returns it; it was
given as `loss=`; or there is none, and the sum of the outputs stands for it."""


Scalar: TypeAlias = str | int | float | bool
"""A value that every logger takes as a config entry or a metric."""


def known_scalars(values: Mapping[str, Scalar | None]) -> dict[str, Scalar]:
    """The entries whose value is known: loggers of hyperparameters refuse None."""
    return {name: value for name, value in values.items() if value is not None}


class BlockKey(NamedTuple):
    """The key of a distinct block: calls of blocks with equal keys cost the same."""

    signature: str
    """Class, parameters and inputs, as text."""
    ambient: str
    """The state around the call, such as autocast, as text."""
    ops: str = ""
    """A digest of the ops that the call ran."""


@dataclass(frozen=True)
class BlockSpans:
    """Seconds of the blocks within a step, at each place of the forward."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """With the replay; 0 for a block that has no backward."""
    forward_host: tuple[float, ...] = ()
    """Of the host, where it works beside the device; else 0."""
    backward_host: tuple[float, ...] = ()
    host_outside: float = 0.0
    """Seconds of the host outside the blocks."""


@dataclass(frozen=True)
class StepTrace:
    """A step with every block recomputed, in numbers.

    Bytes are above what is there all the time.
    """

    order: tuple[str, ...] = ()
    """Paths of the blocks, in the order of the forward."""
    keys: dict[str, BlockKey] = field(default_factory=dict)
    """The key of each block's first call, by path."""
    between: tuple[int, ...] = ()
    """Bytes that the forward made since the block before, for each block."""
    passed: tuple[int, ...] = ()
    """Bytes that each block is given by the one before, and that nothing else holds."""
    before_bytes: int = 0
    """Bytes of activations when the first block begins."""
    first_peak: int = 0
    """The peak before the first block."""
    rest_peak: int = 0
    """The peak between the last block's forward and its backward, above what was there then."""
    last_peak: int = 0
    """The peak after the first block's backward."""
    peak: int = 0
    """The peak of the whole step."""
    seconds: float = 0.0
    spans: BlockSpans | None = None
    """The times of its blocks; None where they are those of a table."""
    cast_epochs: tuple[int, ...] = ()
    """Times that autocast's cache was emptied before each block."""
    cached_rest_peak: int = 0
    """As `rest_peak`, until the cache was emptied."""
    casts_freed_before_backward: bool = False
    """True if the cache was emptied between the last block's forward and its backward."""
    casts_in_backward: bool = False
    """True if the cache held casts when the backward began."""
    inputs: tuple[tuple[int, ...], ...] = ()
    """The shapes that the model was called with; the largest, of several calls."""
    backward_begins: tuple[int | None, ...] = ()
    """Bytes when each block's backward began, with all of its output and without the gradient of
    that; None for a block that has no backward."""
    output_held: int = 0
    """Bytes of the model's output that stayed until the backward had ended."""
    heads: Heads = ()
    """Heads that ran by a strategy."""
    saved_by_rows: int = 0
    """Bytes that copies and gradients of their outputs would have taken at most."""
    followed: frozenset[str] = frozenset()
    """Of these heads, those that a block follows."""
    is_measured: bool = True
    """False if the device has no room for it: then peaks are those of another way to run the heads,
    and what that saved at most."""


@dataclass(frozen=True)
class TracedOp:
    """One op of a block's forward that can be run again."""

    number: int
    """The op's number in its region (`ctx.number` of a policy)."""
    name: str
    seconds: float
    """An estimate of its device time, to be compared with that of other ops."""
    inputs: tuple[int, ...]
    """Indices of the values it is given that the block made."""
    outputs: tuple[int, ...]
    """Indices of the values it makes."""
    address: OpAddress | None = None

    @property
    def module(self) -> str:
        """The path of the module that runs it, in the block."""
        return "" if self.address is None else self.address.module


@dataclass(frozen=True)
class TracedValue:
    """One storage that a block's forward made, or, in compiled code, was given."""

    nbytes: int
    maker: int | None
    """Index of the op that makes it; None if no op can make it again: it is held if needed."""
    changes: bool = False
    """True if it is written to after it was made: a copy made at once would be out of date."""
    module: str = ""
    """The path of the module that makes it, in the block."""
    is_input: bool = False
    """True if the block was given it: compiled blocks move their inputs, too."""


@dataclass(frozen=True)
class BlockTrace:
    """The forward of a block as a graph: its ops, what they make, and what autograd saves."""

    ops: tuple[TracedOp, ...]
    values: tuple[TracedValue, ...]
    saved: frozenset[int]
    """Indices of the values that autograd saves."""
    saved_tensors: tuple[int | None, ...] = ()
    """Saved tensors, in order: a value's index, or None for a tensor from outside."""
    communicates: bool = False
    """True if the block runs collectives: ranks then have to recompute the same ones."""
    recomputable: tuple[int, ...] = ()
    """Indices into `saved_tensors` of those that one op makes again from other saved tensors."""
    saved_in: tuple[str, ...] = ()
    """Paths of the modules in which the `saved_tensors` were saved."""
    called: tuple[str, ...] = ()
    """Paths of the modules inside the block that were called, and could be recomputed."""
    input_bytes: int = 0
    """Bytes of the input that the block holds to recompute from, if a plan may move it."""

    def saved_outside(self, modules: tuple[str, ...]) -> tuple[int, ...]:
        """Indices of the `saved_tensors` that are saved where some modules are recomputed."""
        if not modules:
            return tuple(range(len(self.saved_tensors)))
        inside = [any(p == m or p.startswith(f"{m}.") for m in modules) for p in self.saved_in]
        return tuple(i for i, is_in in enumerate(inside) if not is_in)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the values that autograd saves."""
        return sum(self.values[v].nbytes for v in self.saved)

    def structure(self) -> str:
        """A digest of all but sizes and seconds: equal where the same ops run."""
        ops = [replace(op, seconds=0.0) for op in self.ops]
        values = [replace(value, nbytes=0) for value in self.values]
        saves = (sorted(self.saved), self.saved_tensors, self.saved_in)
        text = repr((ops, values, saves))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Candidate:
    """One strategy for a block, with what it costs.

    Bytes are of device memory, and peaks are above what is there before the forward or the backward
    begins. Seconds are of the device, but for those that are called the host's.
    """

    strategy: Strategy
    """`Keep`, `Recompute`, `RecomputeInTiles`, `SavedIndices`, or `Selective` with `PlannedOps` or
    `NumberedOps`.

    `Selective` can recompute anything, but has the host look at every op. `SavedIndices` goes by
    what autograd saves, and makes again what one op gives back. A compiled block has `Compiled` in
    place of `Selective`: its graphs recompute.
    """
    bytes_held: int = 0
    """Bytes that the forward leaves on the device for the backward, its output included."""
    bytes_moved: int = 0
    """Bytes that are copied to the strategy's tier, and back."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_peak: int = 0
    """Bytes of the forward's highest point: what it holds in the end, and its workspace."""
    backward_peak: Difference = 0
    """Bytes of the backward's highest point, such as a replay's results and gradients."""
    forward_host_seconds: float = 0.0
    """Seconds in which the host launches the forward; 0 where host and device are one."""
    backward_host_seconds: float = 0.0
    largest_moved: int = 0
    """Bytes of the largest result that is moved."""
    input_freed: int = 0
    """Bytes of its input that it does not hold after its forward."""
    seconds_noise: float = 0.0
    """Seconds by which its runs, forward and backward, differed when it was measured."""
    is_exact: bool = True
    """False if gradients differed in their last bits from those of the block without a plan, when
    it was measured: graphs that recompute fuse other ops."""
    casts_cached: int = 0
    """Bytes of casts of its weights that autocast's cache alone holds after its forward."""
    casts_held: int = 0
    """Bytes of such casts that it holds itself until its backward; part of `bytes_held`."""
    kept_names: tuple[str, ...] = ()
    """Words for the ops whose results `Selective` keeps, the largest result first."""
    recomputed_names: tuple[str, ...] = ()
    """Words for the ops whose results `SavedIndices` makes again."""
    offloaded_names: tuple[str, ...] = ()
    """Words for the ops whose results are moved."""

    @property
    def seconds(self) -> float:
        """Seconds that it takes alone: the device's or the host's, whichever is slower."""
        forward = max(self.forward_seconds, self.forward_host_seconds)
        return forward + max(self.backward_seconds, self.backward_host_seconds)

    @property
    def tier(self) -> TierName | None:
        """The tier that results are moved to; None if none are."""
        moving = _moving_part(self.strategy)
        return (
            moving.tier if moving is not None and (moving.offloaded or self.moves_input) else None
        )

    @property
    def moves_input(self) -> bool:
        """True if the block's input is moved."""
        moving = _moving_part(self.strategy)
        return isinstance(moving, PlannedOps) and moving.moves_input

    @property
    def words(self) -> tuple[str, ...]:
        """The words for what is done with activations: keep, recompute, offload, spill."""
        match self.strategy:
            case Keep():
                return ("keep",)
            case Selective(policy=PlannedOps(kept=kept) | NumberedOps(kept=kept)):
                found = ["keep"] if kept else []
                found.append("recompute")
            case SavedIndices(recomputed=recomputed, modules=modules):
                found = ["keep", "recompute"] if recomputed or modules else ["keep"]
            case Compiled():
                found = ["keep", "recompute"]
            case _:
                found = ["recompute"]
        return (*found, WORD_OF_TIER[self.tier]) if self.tier is not None else tuple(found)

    def describe(self) -> str:
        """The strategy in a few words, such as `keep 2 results (mm x2), recompute the rest`."""
        parts = []
        match self.strategy:
            case Keep():
                return "keep"
            case RecomputeInTiles(modules=modules, chunks=chunks):
                return f"recompute, {_format_modules(modules)} in {chunks} tiles"
            case Selective(policy=PlannedOps(kept=kept) | NumberedOps(kept=kept)):
                rest = "recompute"
                if kept:
                    parts.append(f"keep {_format_results(len(kept), self.kept_names)}")
            case SavedIndices(recomputed=recomputed, modules=modules):
                rest = "keep"
                what = [_format_modules(modules)] if modules else []
                if recomputed:
                    what.append(_format_results(len(recomputed), self.recomputed_names))
                if what:
                    parts.append(f"recompute {' and '.join(what)}")
            case Compiled(budget=budget):
                rest = "recompute"
                names = self.kept_names
                saved = f" {_format_results(len(names), names)}" if names else ""
                parts.append(f"keep{saved} at a budget of {budget:g}")
            case _:
                rest = "recompute"
        moving = _moving_part(self.strategy)
        if moving is not None and self.tier is not None:
            what = ["the input"] if self.moves_input else []
            if moving.offloaded:
                what.append(_format_results(len(moving.offloaded), self.offloaded_names))
            parts.append(f"{WORD_OF_TIER[moving.tier]} {' and '.join(what)}")
        return ", ".join([*parts, f"{rest} the rest" if parts else rest])

    def __repr__(self) -> str:
        held = f"{format_bytes(self.bytes_held)} held"
        return f"<Candidate: {self.describe()}: {held}, {self.seconds * 1e3:.2f} ms>"

    def inconsistencies(self) -> Iterator[Inconsistency]:
        """Places where fields of the right types contradict each other, with what is wrong."""
        moving, name = _moving_part(self.strategy), type(self.strategy).__name__
        whole = Keep | Recompute | RecomputeInTiles | Compiled
        if moving is None and not isinstance(self.strategy, whole):
            yield "strategy", f"should be one that a plan has, but is {name}"
        if self.bytes_moved and moving is None:
            yield "bytes_moved", f"should be 0 where the strategy is {name}"
        if self.largest_moved > self.bytes_moved:
            yield "largest_moved", f"is more than is moved: {self.largest_moved}"


def _moving_part(strategy: Strategy) -> SavedIndices | PlannedOps | NumberedOps | None:
    """The part of a strategy that says what is moved; None if it cannot move anything."""
    match strategy:
        case SavedIndices():
            return strategy
        case Compiled(inner=inner):
            return _moving_part(inner)
        case Selective(policy=PlannedOps() | NumberedOps() as policy):
            return policy
    return None


def _format_results(count: int, names: tuple[str, ...]) -> str:
    """How many results, and of which ops: `3 results (mm x2, attention)`."""
    many = len(names) or count
    text = f"{many} result{'s' if many > 1 else ''}"
    kinds = list(Counter(names).items())
    words = [f"{name} x{many}" if many > 1 else name for name, many in kinds[:_KINDS_NAMED]]
    if len(kinds) > _KINDS_NAMED:
        words.append(f"{sum(many for _, many in kinds[_KINDS_NAMED:])} more")
    return f"{text} ({', '.join(words)})" if words else text


_KINDS_NAMED = 4
"""Kinds of ops, or of modules, that a description names; of more, it says how many."""


def _format_modules(paths: tuple[str, ...]) -> str:
    """Modules in a few words: `norm, experts.*.act x8`."""
    kinds = list(Counter(map(generalized, paths)).items())
    words = [f"{name} x{many}" if many > 1 else name for name, many in kinds[:_KINDS_NAMED]]
    if len(kinds) > _KINDS_NAMED:
        words.append(f"{sum(many for _, many in kinds[_KINDS_NAMED:])} more modules")
    return ", ".join(words)


@dataclass(frozen=True)
class BlockProfile:
    """The candidates of a block that occurs once or more in a model."""

    kind: str
    """The block's class."""
    signature: str
    """Text that tells blocks apart: class, parameters and inputs."""
    candidates: tuple[Candidate, ...]
    around: str = ""
    """The ambient state of its calls, such as autocast, which tells blocks apart, too."""
    output_freed: int = 0
    """Bytes of its output that it does not hold itself, by any candidate."""
    ops: str = ""
    """A digest of the ops that it runs, which tells blocks with one signature apart; "" in older
    files."""
    is_compiled: bool = False
    """True if it was measured as compiled code."""

    def __repr__(self) -> str:
        return f"<BlockProfile of {self.kind}: {format_count(len(self.candidates), 'candidate')}>"

    def inconsistencies(self) -> Iterator[Inconsistency]:
        """Places where fields of the right types contradict each other, with what is wrong."""
        for strategy, word in ((Keep(), "keep"), (Recompute(), "recompute")):
            count = sum(candidate.strategy == strategy for candidate in self.candidates)
            if count != 1:
                yield "candidates", f"should have one that is to {word}, but {count} are"


@dataclass(frozen=True)
class Profile:
    """The measurements of a model's training step.

    Bytes are those of the device's memory: on a GPU what torch's allocator gives out, on a CPU the
    tensors that ops return, without scratch inside an op and random states of regions.
    """

    model: str
    device: str
    batch: str
    """The shapes of the batch."""
    static_bytes: int
    """Bytes of parameters, buffers, gradients, optimizer state: there all the time."""
    before_bytes: Difference
    """Bytes of activations when the first block begins."""
    rest_peak: Difference
    """Bytes that come on top between the last block's forward and its backward, at most."""
    rest_seconds: float
    """Seconds that a step takes outside its blocks."""
    bytes_per_second: float
    """Bandwidth of the link to host memory or disk, each way; 0 if there is none."""
    blocks: tuple[BlockProfile, ...]
    """The distinct blocks."""
    order: tuple[tuple[str, int], ...]
    """The blocks as the forward runs them: path, and index into `blocks`."""
    first_peak: Difference = 0
    """Bytes of the forward's highest point before the first block."""
    last_peak: Difference = 0
    """Bytes of the backward's highest point after the first block's, as an embedding's gradient."""
    between: tuple[int, ...] = ()
    """Bytes that the forward made since the block before, at each place; empty if there are none.
    """
    passed: tuple[int, ...] = ()
    """Bytes of each block's input that nothing but the step's own flow of data holds.

    They are freed after that block's forward, if the block does not hold them either.
    """
    waiting: tuple[int, ...] = ()
    """Bytes that are there in each block's backward, and that no block holds: gradients of what
    several blocks use, such as tied weights or an encoder's output, wait until all of them are
    there. Empty if that was not measured."""
    inputs: tuple[tuple[int, ...], ...] = ()
    """The shapes that the model itself was called with; empty if the step called parts of it."""
    unused: tuple[str, ...] = ()
    """Blocks that the step did not run."""
    left_out: tuple[str, ...] = ()
    """Modules that repeat and have no block, because other blocks were named."""
    recompute_peak: int | None = None
    """The measured peak of a step with every block recomputed."""
    recompute_seconds: float | None = None
    """The time of a step with every block recomputed, as it was measured."""
    planning_peak: int | None = None
    """The peak of profiling itself; None where nothing was allocated."""
    cast_epochs: tuple[int, ...] = ()
    """How often autocast's cache of casts was emptied before each place; empty without autocast."""
    cached_rest_peak: int = 0
    """As `rest_peak`, while autocast's cache holds the casts of the blocks' weights."""
    casts_in_backward: bool = False
    """True if autocast's cache holds casts until the step ends."""
    output_held: int = 0
    """Bytes of the model's output that stay until the backward has ended."""
    loss: LossSource = "model"
    rest_host_seconds: float = 0.0
    """Seconds in which the host launches what is outside the blocks; 0 where host and device are
    one."""
    tier_bytes: int | None = None
    """Bytes that there is room for in host memory, or on disk; None if that is not known."""
    heads: Heads = ()
    """Heads that run by a strategy in the step whose figures these are; without a plan, none."""
    rests: tuple[Rest, ...] = ()
    """Other ways to run the head and the loss: each has other figures outside the blocks."""

    @property
    def is_exact(self) -> bool:
        """True if no candidate changes the last bits of gradients."""
        return all(is_exact(rest.heads) for rest in self.rests) and all(
            is_exact_strategy(each.strategy) for block in self.blocks for each in block.candidates
        )

    def with_each_rest(self) -> "tuple[Profile, ...]":
        """The profiles of a step that runs its head and loss in one way; those worth a try.

        The first one is this profile's, unless another way takes neither more memory nor more time.
        """
        own = self.rest
        is_needed = not any(rest.is_no_worse(own) for rest in self.rests)
        every = (own, *self.rests) if is_needed else self.rests
        return tuple(self.with_rests(rest) for rest in every)

    def with_heads(self, heads: Heads) -> "Profile":
        """The profile of a step that runs its heads so, and in no other way."""
        return self.with_rests(next(r for r in (self.rest, *self.rests) if r.heads == heads))

    @property
    def rest(self) -> Rest:
        """The profile's own way to run the head and the loss."""
        return Rest(self.heads, **{name: getattr(self, name) for name in FIELDS})

    def with_rests(self, own: Rest, *others: Rest) -> "Profile":
        """The profile with one way to run the head and the loss as its own, and others beside."""
        figures = {name: getattr(own, name) for name in FIELDS}
        return replace(self, heads=own.heads, rests=others, **figures)

    @property
    def compiled(self) -> tuple[str, ...]:
        """Paths of the blocks that were measured as compiled code."""
        found = (path for path, index in self.order if self.blocks[index].is_compiled)
        return tuple(dict.fromkeys(found))

    def candidates(self, position: int) -> tuple[Candidate, ...]:
        """The candidates at one place of the forward."""
        return self.blocks[self.order[position][1]].candidates

    def inconsistencies(self) -> Iterator[Inconsistency]:
        """Places where fields of the right types contradict each other, with what is wrong."""
        if not self.order:
            yield "order", "should name a block, but is empty"
        for i, (_, index) in enumerate(self.order):
            if index >= len(self.blocks):
                yield f"order[{i}]", f"is block {index} of {len(self.blocks)}"
        for name in ("between", "passed", "waiting", "cast_epochs"):
            if len(getattr(self, name)) not in (0, len(self.order)):
                yield name, f"should have {len(self.order)} numbers, as order has, or none"
        yield from repeated_paths(self.unused, {path for path, _ in self.order})
        for i, block in enumerate(self.blocks):
            for j, candidate in enumerate(block.candidates):
                if candidate.bytes_moved and not self.bytes_per_second:
                    yield f"blocks[{i}].candidates[{j}].bytes_moved", "cannot be: there is no link"

    def as_dict(self) -> dict[str, Scalar]:
        """The profile's figures as a flat dict of numbers and words, for logs.

        Names are those of fields; `blocks` and `candidates` are counts. Unknown figures are left
        out.
        """
        counts = {
            "blocks": len(self.order),
            "distinct_blocks": len(self.blocks),
            "candidates": sum(len(block.candidates) for block in self.blocks),
        }
        return known_scalars({**{name: getattr(self, name) for name in _LOGGED}, **counts})

    def as_json(self) -> dict[str, Any]:
        """The profile as plain values: all that its file has."""
        return json_files.as_json(self, "profile")

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        snapshot: str | os.PathLike[str] | None = None,
        points: int = 12,
        others: OtherSteps | None = None,
        explanation: Any = None,
    ) -> Path:
        """Write a page with a slider over budgets, and the plan for each.

        It is one file that needs nothing from elsewhere. Returns its path.

        Args:
            path: the file to write, such as `"profile.html"`.
            snapshot: a second file to write, such as `"profile.pickle"`: the predicted memory of a
                plain step, for torch's page of memory snapshots (pytorch.org/memory_viz).
            points: plans to look for, from the plain peak down to the smallest that works.
            others: steps to draw beside the plans, by their names: the peak in bytes, and seconds.
            explanation: what `rekindle.explain` returned, to be shown on the same page.
        """
        return as_page(self, PageRequest(path, snapshot, points, others, None, explanation))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON."""
        json_files.save(self, "profile", path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Profile":
        """Read a file that `save` wrote, of this version of rekindle or an older one."""
        return json_files.load(cls, "profile", path)

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        counts = f"{format_count(len(self.order), 'block')}, {len(self.blocks)} distinct"
        return f"<Profile of {self.model} on {self.device}: {counts}>"

    def _repr_html_(self) -> str:
        return as_html(self)


_LOGGED = (
    "model",
    "device",
    "batch",
    "loss",
    "static_bytes",
    "before_bytes",
    "rest_peak",
    "rest_seconds",
    "bytes_per_second",
    "recompute_peak",
    "recompute_seconds",
    "planning_peak",
    "tier_bytes",
)
"""Fields of a profile that logs take."""


def repeated_paths(unused: tuple[str, ...], used: Iterable[str]) -> Iterator[Inconsistency]:
    """Blocks that did not run, and that are named a second time, or did run."""
    for i, path in enumerate(unused):
        if path in used or path in unused[:i]:
            yield f"unused[{i}]", f"names {path!r} a second time"


@dataclass(frozen=True)
class Prediction:
    """The peak and the time of a step, as the timeline has them."""

    peak: int
    seconds: float
    at: str = field(default="", compare=False)
    """Where in the step the peak is."""


@dataclass(frozen=True)
class Solution:
    """A candidate for each block, in the order of the forward, with what the timeline predicts."""

    candidates: tuple[Candidate, ...]
    prediction: Prediction
    gap: float
    """How far from the best the time may be, as a share; 1 if that is not known."""
    heads: Heads = ()
    """Heads that run by a strategy."""


@dataclass(frozen=True)
class Nearby:
    """The time of a step within another budget."""

    budget: int
    seconds: float | None
    """Seconds of a step; None if no plan fits."""
