"""Changes to a training step: what each is predicted to save and to cost, the most useful first.

What is done with the activations of blocks is predicted by the planner's timeline. What is done
with the rest of the step (the loss, the batch, the optimizer) follows from the recorded step: its
storages are counted again without those that the change does away with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from rekindle.errors import RekindleError
from rekindle.explanation.record import StepRecord, Storage
from rekindle.explanation.summarize import highest
from rekindle.explanation.types import Change
from rekindle.modules.patterns import generalized
from rekindle.planner.plan_for_budget import plain_candidates, plain_prediction, solved
from rekindle.planner.timeline import Timeline
from rekindle.planner.treatments import treatments
from rekindle.planner.types import Candidate, Prediction, Profile
from rekindle.sizes import format_bytes
from rekindle.strategy import Keep, Recompute

_MOST = 5
"""Changes that are named; more would bury the best."""
_LEAST_SHARE = 0.01
"""Share of the peak that a change has to save to be of use."""
_ABOUT = 0.95
"""Share of what a change saves that another one has to save to do as much."""
_USUAL = 0.1
"""Share of a step's time that a change of candidates may add, where no memory is to be met."""
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


@dataclass(frozen=True)
class StepFacts:
    """Facts about a step that its profile does not have."""

    record: StepRecord
    peak: int
    """The recorded peak, with all that is there all the time."""
    static_bytes: int
    gradient_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
    optimizer_elements: int
    """Numbers that the optimizer's state has."""
    device_bytes: int | None
    samples: int | None
    """The number of samples in the batch; None if that is not known."""
    loss_by_rows: str
    """The code of a loss that goes by rows."""


@dataclass(frozen=True)
class Changes:
    """Changes that help, the most useful first, and others that do not."""

    useful: tuple[Change, ...]
    others: tuple[Change, ...]
    """Changes that help less, or cost more, than another that does as much."""
    unhelpful: tuple[Change, ...]


def find_changes(profile: Profile, facts: StepFacts) -> Changes:
    """Return the most useful changes to a step, and those that save next to nothing.

    The most useful one saves the largest share of the peak, less the share of time that it adds.
    Where the step does not fit the device, changes by which it fits come before the others.
    """
    plain = plain_prediction(profile)
    found = [*_of_blocks(profile, plain, facts), *_of_the_rest(profile, facts)]
    limit = facts.device_bytes
    if limit is not None:
        found = [replace(each, fits=each.peak <= limit) for each in found]
    helps = [each for each in found if each.saved >= _LEAST_SHARE * plain.peak]

    def usefulness(change: Change) -> tuple[bool, float]:
        slower = 0.0 if change.seconds is None else change.seconds / plain.seconds - 1
        return bool(change.fits) and facts.peak > (limit or 0), change.saved / plain.peak - slower

    helps.sort(key=usefulness, reverse=True)
    useful = [each for each in helps if not _is_dominated(each, helps)][:_MOST]
    others = [each for each in helps if each not in useful]
    unhelpful = [_explained(each) for each in found if each not in helps]
    return Changes(tuple(useful), tuple(others), tuple(unhelpful))


def _is_dominated(change: Change, others: list[Change]) -> bool:
    """Return whether another change saves about as much, and takes less time."""
    if change.seconds is None:
        return False
    return any(
        other.seconds is not None
        and other.seconds < change.seconds
        and other.saved >= _ABOUT * change.saved
        for other in others
    )


def _explained(change: Change) -> Change:
    """Return a change that does not help, with the reason."""
    if change.note:
        return change
    return replace(change, note=f"the peak is in {change.peak_at}")


def _of_blocks(profile: Profile, plain: Prediction, facts: StepFacts) -> Iterator[Change]:
    """Yield changes to what is done with the activations of the blocks."""
    choices = _Choices(profile, plain, facts)
    yield choices.recompute_all()
    if len(dict.fromkeys(path for path, _ in profile.order)) > 1:
        yield choices.recompute_some()
    yield from choices.by_kind("keep the costly results of each block", moves=False)
    if profile.bytes_per_second:
        yield from choices.by_kind("offload from every block", moves=True)
    else:
        none = "the device has no link over which activations could leave"
        yield Change("offload", "", plain.peak, 0, plain.seconds, plain.at, none)
    if find_spec("scipy") is not None:
        yield from choices.plan()


class _Choices:
    """Choices of candidates for the blocks of a step."""

    def __init__(self, profile: Profile, plain: Prediction, facts: StepFacts) -> None:
        self._profile = profile
        self._plain = plain
        self._timeline = Timeline(profile)
        limit = facts.device_bytes
        self._limit = limit if limit is not None and limit < plain.peak else None
        """Bytes that the step has to fit into; None if it fits, or they are not known."""

    def recompute_all(self) -> Change:
        """Recompute every block."""
        paths = dict.fromkeys(generalized(path) for path, _ in self._profile.order)
        strategies = ", ".join(f'"{path}": "recompute"' for path in paths)
        found = self._recomputing(len(self._profile.order))
        how = f"rekindle.apply(model, {{{strategies}}})"
        return self._change("recompute every block", how, found)

    def recompute_some(self) -> Change:
        """Recompute the first blocks: as few as fit, or else half of them."""
        paths = list(dict.fromkeys(path for path, _ in self._profile.order))
        count = len(paths) // 2
        if self._limit is not None:
            fitting = (k for k in range(1, len(paths)) if self._fits(self._recomputing(k)))
            count = next(fitting, count)
        name = f"recompute {count} of {len(paths)} blocks"
        how = f'rekindle.apply(model, dict.fromkeys(paths[:{count}], "recompute"))'
        return self._change(name, how, self._recomputing(count))

    def by_kind(self, name: str, moves: bool) -> Iterator[Change]:
        """Yield the best choice of those that treat all blocks alike, with offload or without."""
        found = []
        for indices in treatments(self._profile):
            candidates = [self._profile.candidates(i)[k] for i, k in enumerate(indices)]
            if moves == any(each.bytes_moved for each in candidates) and not all(
                isinstance(each.strategy, Keep | Recompute) for each in candidates
            ):
                found.append(candidates)
        if not found:
            return
        best = self._best(found)
        largest = max(best, key=lambda candidate: candidate.bytes_moved)
        yield self._change(name, self._fit_to(self._predict(best).peak), best, largest.describe())

    def plan(self) -> Iterator[Change]:
        """Yield a plan: for the memory of the device; or if all fits, for half of the activations.

        None if no plan fits.
        """
        static = self._profile.static_bytes
        limit = self._limit or static + (self._plain.peak - static) // 2
        try:
            plan = solved(self._profile, limit)
        except RekindleError:
            return
        candidates = [candidate for _, _, candidate in plan.blocks]
        yield self._change(f"a plan for {format_bytes(limit)}", self._fit_to(limit), candidates)

    def _recomputing(self, count: int) -> list[Candidate]:
        """The candidates that recompute so many of the blocks, the first ones of the forward."""
        paths = list(dict.fromkeys(path for path, _ in self._profile.order))[:count]
        candidates = plain_candidates(self._profile)
        for i, (path, _) in enumerate(self._profile.order):
            if path in paths:
                menu = self._profile.candidates(i)
                candidates[i] = next(each for each in menu if each.strategy == Recompute())
        return candidates

    def _best(self, choices: list[list[Candidate]]) -> list[Candidate]:
        """The fastest that fits; where nothing has to, the lowest that takes a tenth more time."""
        found = [(self._predict(candidates), candidates) for candidates in choices]
        if self._limit is None:
            longest = (1 + _USUAL) * self._plain.seconds
            quick = [each for each in found if each[0].seconds <= longest]
            if not quick:
                return min(found, key=lambda each: each[0].seconds)[1]
            return min(quick, key=lambda each: (each[0].peak, each[0].seconds))[1]
        fitting = [each for each in found if each[0].peak <= self._limit]
        if fitting:
            return min(fitting, key=lambda each: each[0].seconds)[1]
        return min(found, key=lambda each: (each[0].peak, each[0].seconds))[1]

    def _fits(self, candidates: Sequence[Candidate]) -> bool:
        return self._limit is not None and self._predict(candidates).peak <= self._limit

    def _predict(self, candidates: Sequence[Candidate]) -> Prediction:
        return self._timeline.predict_candidates(candidates)

    def _fit_to(self, peak: int) -> str:
        return f'rekindle.fit(model, batch, budget="{_as_budget(peak)}")'

    def _change(self, name: str, how: str, by: Sequence[Candidate], note: str = "") -> Change:
        """Predict a step by these candidates, and compare it with the plain one."""
        found = self._predict(by)
        saved = self._plain.peak - found.peak
        if saved < _LEAST_SHARE * self._plain.peak:
            note = ""
        replayed = [
            path or "the model"
            for (path, _), each in zip(self._profile.order, by, strict=True)
            if not isinstance(each.strategy, Keep)
        ]
        at = found.at
        if at.removeprefix("the backward of ") in replayed:
            at = at.replace("the backward of", "the replay and backward of")
        return Change(name, how, found.peak, saved, found.seconds, at, note)


def _as_budget(nbytes: int) -> str:
    """Bytes as a budget is written, rounded up a little."""
    unit, size = next(
        (unit, size) for unit, size in _UNITS if nbytes % size == 0 or nbytes >= 1024 * size
    )
    return f"{-(-nbytes // size)}{unit}"


def _of_the_rest(profile: Profile, facts: StepFacts) -> Iterator[Change]:
    """Yield changes to the step outside of its blocks."""
    at = "the step as recorded"
    if any(storage.classes for storage in facts.record.storages()):
        peak = facts.static_bytes + _peak_by_rows(facts.record)
        note = "estimated; the loss runs a second time, some rows of logits at a time"
        yield _estimate(facts, "exact rows for the loss", facts.loss_by_rows, peak, note, at)
    yield from _of_the_batch(facts, at)
    if facts.optimizer_bytes:
        peak = facts.peak - facts.optimizer_bytes + facts.optimizer_elements
        note = "estimated; not exact: the optimizer's state is rounded"
        how = "an optimizer with 8-bit state"
        yield _estimate(facts, "8-bit optimizer state", how, peak, note, at)
    if facts.optimizer_bytes and profile.bytes_per_second:
        moved = facts.gradient_bytes + facts.parameter_bytes
        seconds = plain_prediction(profile).seconds + moved / profile.bytes_per_second
        note = (
            "estimated; gradients go out and parameters come back, the host's own time not counted"
        )
        how = "an optimizer that steps on the host"
        peak = facts.peak - facts.optimizer_bytes
        change = _estimate(facts, "optimizer state in host memory", how, peak, note, at)
        yield replace(change, seconds=seconds)


def _of_the_batch(facts: StepFacts, at: str) -> Iterator[Change]:
    """Yield a smaller batch, whose storages are half as large but for those of parameters."""
    if facts.samples == 1:
        name, how = "sequences of half the length", "cut the batch's tokens"
    elif facts.samples is None or facts.samples > 1:
        name, how = "half the samples", "two smaller steps that add up their gradients"
    else:
        return
    peak = facts.static_bytes + highest(facts.record, _halved)
    note = "estimated; the step takes about half the time, for half the work"
    yield _estimate(facts, name, how, peak, note, at)


def _estimate(facts: StepFacts, name: str, how: str, peak: int, note: str, at: str) -> Change:
    return Change(name, how, peak, facts.peak - peak, None, at, note)


def _halved(storage: Storage) -> int:
    return storage.nbytes if storage.of_parameters else storage.nbytes // 2


def _peak_by_rows(record: StepRecord) -> int:
    """Bytes above the static ones of a step whose loss goes by rows.

    Of logits, what the head's product made stays, and its gradient takes its place.
    """
    products = [s.nbytes for s in record.storages() if s.classes and not s.made_from]
    kept = max(products, default=0)
    found = logits = others = 0
    for event in record.events:
        change = -event.storage.nbytes if event.is_freed else event.storage.nbytes
        if event.storage.classes:
            logits += change
        else:
            others += change
        found = max(found, others + min(logits, kept))
    return found
