"""Changes to a step outside of its blocks: to the loss, the batch, the optimizer.

They follow from the recorded step: its storages are counted again without those that the change
does away with.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rekindle.explanation.record import StepRecord, Storage
from rekindle.explanation.summarize import format_moment, highest
from rekindle.explanation.types import Change
from rekindle.planner.plan_for_budget import plain_candidates, plain_prediction
from rekindle.planner.rest import is_exact
from rekindle.planner.timeline import simulate
from rekindle.planner.types import Profile


@dataclass(frozen=True)
class StepFacts:
    """Facts about a step that its profile does not have."""

    record: StepRecord
    model: str
    """The name of the model's class."""
    peak: int
    """The recorded peak, with all that is there all the time."""
    peak_at: str
    static_bytes: int
    gradient_bytes: int
    parameter_bytes: int
    batch_bytes: int
    optimizer_bytes: int
    optimizer_elements: int
    """Numbers that the optimizer's state has."""
    device_bytes: int | None
    samples: int | None
    """The number of samples in the batch; None if that is not known."""
    loss_by_rows: str
    """The code of a loss that goes by rows."""


def changes_outside_blocks(profile: Profile, facts: StepFacts) -> Iterator[Change]:
    """Yield changes to the loss, the batch and the optimizer."""
    if profile.rests:
        yield from _heads_by_rows(profile)
    elif any(storage.classes for storage in facts.record.storages()):
        yield _by_rows(facts)
    yield from _of_the_batch(facts)
    if not facts.optimizer_bytes:
        return
    plain = plain_prediction(profile)
    freed = facts.optimizer_bytes - facts.optimizer_elements
    yield Change(
        name="8-bit optimizer state",
        how="an optimizer with 8-bit state",
        peak=facts.peak - freed,
        saved=freed,
        seconds=None,
        peak_at=facts.peak_at,
        note="estimated; not exact: the optimizer's state is rounded",
        same_step=False,
    )
    if profile.bytes_per_second:
        moved = facts.gradient_bytes + facts.parameter_bytes
        yield Change(
            name="optimizer state in host memory",
            how="an optimizer that steps on the host",
            peak=facts.peak - facts.optimizer_bytes,
            saved=facts.optimizer_bytes,
            seconds=plain.seconds + moved / profile.bytes_per_second,
            peak_at=facts.peak_at,
            note="estimated; gradients leave, parameters come back, the host's time not counted",
        )


def _of_the_batch(facts: StepFacts) -> Iterator[Change]:
    """Yield a smaller batch, whose storages are half as large but for those of parameters."""
    name, how = "half the samples", "two smaller steps that add up their gradients"
    if facts.samples == 1:
        name, how = "sequences of half the length", "a batch with half the tokens"
    elif facts.samples == 0:
        return
    event, nbytes = highest(facts.record, _halved)
    peak = facts.static_bytes - facts.batch_bytes // 2 + nbytes
    at = format_moment(facts.record, event, facts.model)
    note = "estimated; half the work in about half the time"
    yield Change(name, how, peak, facts.peak - peak, None, at, note, same_step=False)


def _halved(storage: Storage) -> int:
    return storage.nbytes if storage.of_parameters else storage.nbytes // 2


def _heads_by_rows(profile: Profile) -> Iterator[Change]:
    """Yield each way to run the heads that the profile has, with the step that it predicts."""
    plain, candidates = plain_prediction(profile), plain_candidates(profile)
    for rest in profile.rests:
        found = simulate(profile.with_heads(rest.heads), candidates)
        heads = ", ".join(
            f'"{path}": rekindle.strategy.{strategy!r}' for path, _, strategy in rest.heads
        )
        name = "exact rows for the loss" if is_exact(rest.heads) else "head and loss by rows"
        yield Change(
            name=name,
            how=f"rekindle.apply(model, {{{heads}}})",
            peak=found.peak,
            saved=plain.peak - found.peak,
            seconds=found.seconds,
            peak_at=found.at,
            note="" if is_exact(rest.heads) else "not exact: gradients are added up otherwise",
        )


def _by_rows(facts: StepFacts) -> Change:
    """Return a loss that goes by rows of the logits.

    Of logits, those that the head's product made stay, and their gradient takes their place.
    """
    record = facts.record
    kept = max((s.nbytes for s in record.storages() if s.classes and not s.made_from), default=0)
    most, event = 0, -1
    logits = others = 0
    for i, each in enumerate(record.events):
        change = -each.storage.nbytes if each.is_freed else each.storage.nbytes
        if each.storage.classes:
            logits += change
        else:
            others += change
        if others + min(logits, kept) > most:
            most, event = others + min(logits, kept), i
    peak = facts.static_bytes + most
    at = format_moment(record, event, facts.model)
    note = "estimated; the loss runs a second time, some rows of logits at a time"
    name = "exact rows for the loss"
    return Change(name, facts.loss_by_rows, peak, facts.peak - peak, None, at, note)
