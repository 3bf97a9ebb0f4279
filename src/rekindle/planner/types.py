"""What passes between measuring, choosing and applying: plain values, that print and compare."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rekindle.offload.offload_options import FATE_OF_TIER, TierName
from rekindle.planner import json_files
from rekindle.planner.json_schema import Difference, Inconsistency
from rekindle.strategy import OpAddress

LossSource: TypeAlias = Literal["model", "given", "none"]
"""Where a step's loss comes from: the model, or the function that is the step, returns it; it was
given as `loss=`; or there is none, and the sum of the outputs stands for it."""

OptionFate: TypeAlias = Literal["keep", "recompute", "derive", "select"]


@dataclass(frozen=True)
class Option:
    """One way to run a block, and what it costs."""

    fate: OptionFate
    """`keep` (plain), `recompute` (all of it), `derive` or `select`.

    `select` goes op by op: it can recompute anything, but has the host look at every op. `derive`
    goes by what autograd saves, and makes again what one op gives back.
    """
    kept: tuple[int, ...] = ()
    """With `select`: numbers of the ops whose results stay."""
    offloaded: tuple[int, ...] = ()
    """What goes away, to `tier`: numbers of ops with `select`, of what is saved with `derive`."""
    bytes_held: int = 0
    """What the forward leaves on the device, its output included."""
    bytes_moved: int = 0
    """What goes away, and comes back."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_peak: int = 0
    """The most that the forward has on the device, above what was there before it."""
    backward_peak: Difference = 0
    """The most that the backward has on the device, above what was there before it."""
    kept_names: tuple[str, ...] = ()
    """Words for the ops of `kept`, the largest result first: for people."""
    offloaded_names: tuple[str, ...] = ()
    derived: tuple[int, ...] = ()
    """With `derive`: numbers of what is saved and one op makes again."""
    derived_names: tuple[str, ...] = ()
    forward_host: float = 0.0
    """Seconds that the host takes to have the device do it; 0 where they are one."""
    backward_host: float = 0.0
    largest_moved: int = 0
    """Bytes of the largest result that is moved."""
    tier: TierName = "host"
    """Where results go that are moved: `host` memory or `disk`."""
    input_let_go: int = 0
    """Bytes of what it is given that it does not hold, once its forward is over."""
    seconds_noise: float = 0.0
    """Seconds by which its runs, forward and backward, differed when it was measured."""
    casts_cached: int = 0
    """Bytes of casts of its weights that autocast's cache alone holds after its forward."""
    casts_held: int = 0
    """Bytes of such casts that it holds itself until its backward; part of `bytes_held`."""
    saves: int = 0
    """With `derive`: how many tensors autograd saves in the block; 0 if that is not known."""
    kept_ops: tuple[OpAddress, ...] = ()
    """With `select`: where the ops of `kept` are, by which they are found in a step.

    Empty in a plan of an older file, and where nothing is kept: then the numbers count.
    """
    offloaded_ops: tuple[OpAddress, ...] = ()
    """The same for `offloaded`, with `select`."""

    @property
    def seconds(self) -> float:
        """What it takes alone: as long as the device, or the host, whichever is slower."""
        forward = max(self.forward_seconds, self.forward_host)
        return forward + max(self.backward_seconds, self.backward_host)

    def describe(self) -> str:
        """In a few words."""
        if self.fate in ("keep", "recompute"):
            return f"{self.fate} all"
        parts = []
        if self.kept:
            parts.append(f"keep {_results(self.kept, self.kept_names)}")
        if self.derived:
            parts.append(f"recompute {_results(self.derived, self.derived_names)}")
        if self.offloaded:
            results = _results(self.offloaded, self.offloaded_names)
            parts.append(f"{FATE_OF_TIER[self.tier]} {results}")
        if self.fate == "derive":
            return ", ".join([*parts, "keep the rest" if parts else "keep all"])
        return ", ".join([*parts, "recompute the rest" if parts else "recompute all"])

    def inconsistencies(self) -> Iterator[Inconsistency]:
        """What cannot be, of fields that are each of the right type."""
        for name, fates in _NUMBERS.items():
            numbers: tuple[int, ...] = getattr(self, name)
            if list(numbers) != sorted(set(numbers)):
                yield name, f"numbers should go up, but are {list(numbers)[:9]}"
            if numbers and self.fate not in fates:
                yield name, f"should be empty where the fate is {self.fate}"
        for name in ("kept", "derived"):
            if shared := set(self.offloaded) & set(getattr(self, name)):
                yield name, f"has {min(shared)}, which is offloaded, too"
        if self.bytes_moved and self.fate not in _NUMBERS["offloaded"]:
            yield "bytes_moved", f"should be 0 where the fate is {self.fate}"
        if self.largest_moved > self.bytes_moved:
            yield "largest_moved", f"is more than is moved: {self.largest_moved}"


_NUMBERS = {
    "kept": ("select",),
    "offloaded": ("select", "derive"),
    "derived": ("derive",),
}
"""Fields of an option that number results, and the fates that may have some."""


def _results(numbers: tuple[int, ...], names: tuple[str, ...]) -> str:
    """How many results, and of what: `3 results (mm x2, attention)`."""
    many = len(names or numbers)
    count = f"{many} result{'s' if many > 1 else ''}"
    kinds = list(Counter(names).items())
    told = [f"{name} x{many}" if many > 1 else name for name, many in kinds[:_KINDS]]
    if len(kinds) > _KINDS:
        told.append(f"{sum(many for _, many in kinds[_KINDS:])} more")
    return f"{count} ({', '.join(told)})" if told else count


_KINDS = 4
"""Kinds of ops that are told; of more, only how many."""


@dataclass(frozen=True)
class BlockProfile:
    """What was measured of a block that occurs once or more."""

    kind: str
    signature: str
    """What tells blocks apart: class, parameters, inputs, and what they were set to."""
    options: tuple[Option, ...]
    around: str = ""
    """What tells them apart, too: what was around them, such as autocast."""
    output_let_go: int = 0
    """Bytes of its output that it does not hold itself, by any option."""

    def inconsistencies(self) -> Iterator[Inconsistency]:
        """What cannot be, of fields that are each of the right type."""
        for fate in ("keep", "recompute"):
            count = sum(option.fate == fate for option in self.options)
            if count != 1:
                yield "options", f"should have one that is to {fate}, but {count} are"


@dataclass(frozen=True)
class Profile:
    """What was measured of a model's training step.

    Bytes are those of the device's memory: on a GPU what torch's allocator gives out, on a CPU the
    tensors that ops return, without scratch inside an op and random states of regions.
    """

    model: str
    device: str
    batch: str
    """The shapes of the batch."""
    static_bytes: int
    """Parameters, buffers, gradients, optimizer state: there all the time."""
    before_bytes: Difference
    """Activations when the first block begins."""
    rest_peak: Difference
    """The most that comes on top between the last block's forward and its backward."""
    rest_seconds: float
    """What a step takes outside its blocks."""
    bytes_per_second: float
    """To host memory, or to disk, and back; 0 if there is no way."""
    blocks: tuple[BlockProfile, ...]
    order: tuple[tuple[str, int], ...]
    """The blocks as the forward runs them: path, and index into `blocks`."""
    first_peak: Difference = 0
    """The most that the forward has before the first block."""
    last_peak: Difference = 0
    """The most that the backward has after the first block's, such as an embedding's gradient."""
    between: tuple[int, ...] = ()
    """What the forward has made since the block before, at each place; none if there is nothing."""
    passed: tuple[int, ...] = ()
    """Bytes that one block hands to the next and that nobody else holds, at each place.

    They are gone after the next one's forward, if that does not hold them either.
    """
    inputs: tuple[tuple[int, ...], ...] = ()
    """The shapes that the model itself was called with; none if the step called parts of it."""
    unused: tuple[str, ...] = ()
    """Blocks that the step did not run."""
    recompute_peak: int | None = None
    """The peak of a step with every block recomputed, as it was measured."""
    planning_peak: int | None = None
    """The peak of measuring all this; None where nothing was allocated."""
    cast_epochs: tuple[int, ...] = ()
    """How often autocast's cache of casts was emptied before each place; none without autocast."""
    cached_rest_peak: int = 0
    """As `rest_peak`, while autocast's cache holds the casts of the blocks' weights."""
    casts_in_backward: bool = False
    """Whether autocast's cache holds casts until the step ends."""
    output_held: int = 0
    """Bytes of the model's output that stay until the backward has ended."""
    loss: LossSource = "model"
    """Where the step's loss comes from."""

    def options(self, position: int) -> tuple[Option, ...]:
        """The menu at one place of the forward."""
        return self.blocks[self.order[position][1]].options

    def inconsistencies(self) -> Iterator[Inconsistency]:
        """What cannot be, of fields that are each of the right type."""
        if not self.order:
            yield "order", "should name a block, but is empty"
        for i, (_, index) in enumerate(self.order):
            if index >= len(self.blocks):
                yield f"order[{i}]", f"is block {index} of {len(self.blocks)}"
        for name in ("between", "passed", "cast_epochs"):
            if len(getattr(self, name)) not in (0, len(self.order)):
                yield name, f"should have {len(self.order)} numbers, as order has, or none"
        yield from twice(self.unused, {path for path, _ in self.order})
        for i, block in enumerate(self.blocks):
            for j, option in enumerate(block.options):
                if option.bytes_moved and not self.bytes_per_second:
                    yield f"blocks[{i}].options[{j}].bytes_moved", "cannot be: there is no link"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        json_files.save(self, "profile", path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Profile":
        """Read what `save` wrote."""
        return json_files.load(cls, "profile", path)

    def __str__(self) -> str:
        from rekindle.report.text import format_profile  # noqa: PLC0415

        return format_profile(self)


def twice(unused: tuple[str, ...], used: set[str]) -> Iterator[Inconsistency]:
    """Blocks that did not run, and that are named a second time, or did run."""
    for i, path in enumerate(unused):
        if path in used or path in unused[:i]:
            yield f"unused[{i}]", f"names {path!r} a second time"


@dataclass(frozen=True)
class Prediction:
    """What a choice of options leads to."""

    peak: int
    seconds: float
    at: str = field(default="", compare=False)
    """Where in the step the peak is."""


@dataclass(frozen=True)
class Nearby:
    """What a step would take within another budget."""

    budget: int
    seconds: float | None
    """A step; None if no plan fits."""
