"""Changes to a training step: what each is predicted to save and to cost, the most useful first."""

from dataclasses import dataclass, replace

from rekindle.explanation.block_changes import changes_of_blocks
from rekindle.explanation.step_changes import StepFacts, changes_outside_blocks
from rekindle.explanation.types import Change
from rekindle.planner.plan_for_budget import plain_prediction
from rekindle.planner.types import Prediction, Profile
from rekindle.sizes import format_bytes

_MOST = 5
"""Changes that are named; more would bury the best."""
_LEAST_SHARE = 0.01
"""Share of the peak that a change has to save to be of use."""
_ABOUT = 0.95
"""Share of what a change saves that another one has to save to do as much."""


@dataclass(frozen=True)
class Changes:
    """Changes that help, the most useful first, and others that do not."""

    useful: tuple[Change, ...]
    others: tuple[Change, ...]
    """Changes that help less, or cost more, than another that does as much."""
    unhelpful: tuple[Change, ...]


def find_changes(profile: Profile, facts: StepFacts) -> Changes:
    """Return the most useful changes to a step, and those that save next to nothing.

    Where the step does not fit the device, changes by which it fits come first.
    """
    plain, limit = plain_prediction(profile), facts.device_bytes
    found = [*changes_of_blocks(profile, limit), *changes_outside_blocks(profile, facts)]
    if limit is not None:
        found = [replace(each, fits=each.peak <= limit) for each in found]
    helps = [each for each in found if each.saved >= _LEAST_SHARE * plain.peak]
    has_to_fit = limit is not None and facts.peak > limit
    helps.sort(key=lambda each: (has_to_fit and bool(each.fits), _gain(each, plain)), reverse=True)
    useful = [each for each in helps if not _is_dominated(each, helps)][:_MOST]
    others = [each for each in helps if each not in useful]
    unhelpful = [_explained(each) for each in found if each not in helps]
    return Changes(tuple(useful), tuple(others), tuple(unhelpful))


def _gain(change: Change, plain: Prediction) -> float:
    """The share of the peak that a change saves, less the share of time that it adds.

    It counts half if the step is another one with the change, such as one of half the batch.
    """
    slower = 0.0 if change.seconds is None else change.seconds / plain.seconds - 1
    gain = change.saved / plain.peak - slower
    return gain if change.same_step else gain / 2


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
    if not change.how:
        return change
    saves = f"it saves only {format_bytes(change.saved)}, and " if change.saved > 0 else ""
    return replace(change, note=f"{saves}the peak is then in {change.peak_at}")
