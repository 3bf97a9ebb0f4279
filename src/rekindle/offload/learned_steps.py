"""The steps that a device offloader has seen, and what it expects of the next one."""

from dataclasses import replace
from typing import TYPE_CHECKING

from rekindle.offload.step_activations import StepActivations
from rekindle.offload.step_profile import (
    StepProfile,
    measured_profile,
    profile_of_first,
    profile_of_repeat,
)

if TYPE_CHECKING:
    from rekindle.offload.tiers.base import Tier

_MAX_KNOWN = 16
"""Number of steps that are remembered, for a model that is called with several shapes."""
_TRIALS = 8
"""Number of steps that are measured in a row without learning anything that can be used: a shape
that never comes again would have all the others measured for ever."""
_MAX_WAITED = 0.02
"""With quota="auto": the share of a step that the device may wait before it is scheduled anew."""


class LearnedSteps:
    """Learns from steps that are over, and guesses which known step the next one repeats."""

    def __init__(self, quota: float | None, tier: "Tier", limit_in_flight: bool = True) -> None:
        self._quota = quota
        self._limit_in_flight = limit_in_flight
        self._tier = tier
        self.known: list[StepProfile] = []
        """Steps that were seen, the last one first."""
        self._share: float | None = None
        """The share that the last schedule moves."""
        self._trials = _TRIALS

    @property
    def usual_quota(self) -> float:
        """The quota for an unknown step: the user's, or the share that was free last.

        A share is a `float`, bytes are an `int`.
        """
        usual = self._share if self._quota is None else self._quota
        return 1.0 if usual is None else usual

    def next_step(self) -> StepActivations:
        """Begin a step, taken for a repeat of the last one until it shows to be another."""
        is_measured = self._trials > 0 and not all(known.is_checked for known in self.known)
        self._trials -= is_measured
        self._tier.time_copies(is_measured)
        step = StepActivations(self.known[0] if self.known else None, is_measured)
        if is_measured:
            step.tier_growth = self._tier.growth()
        return step

    def learn(self, step: StepActivations) -> None:
        """Learn from a step that is over."""
        known = next((k for k in self.known if k.sizes == tuple(step.sizes)), None)
        found = self._learn_first(step) if known is None else self._learn_repeat(known, step)
        if found.writes != step.writes:
            found = replace(found, writes=step.writes)
        self.known = [found, *(k for k in self.known if k is not known)][:_MAX_KNOWN]

    def _learn_first(self, step: StepActivations) -> StepProfile:
        if step.is_measured and self._quota is None:
            self._share = measured_profile(step.sizes, step.record, None, self._tier).share
        return profile_of_first(
            step.sizes, step.record, self._quota, step.derived_keys, self._limit_in_flight
        )

    def _learn_repeat(self, known: StepProfile, step: StepActivations) -> StepProfile:
        if known.is_checked:
            return known.with_staying(step.record.stays)
        if not step.has_times_of(known):
            self._trials = _TRIALS  # it comes again, so it is worth measuring
            return known.with_staying(step.record.stays)
        self._trials = _TRIALS
        if known.is_timed and step.record.share_waited(self._tier) <= _MAX_WAITED:
            self._tier.shrink()
            return known.checked()
        found = profile_of_repeat(known, step.record, self._quota, self._tier)
        self._share = found.share
        if self._quota is not None:  # the user asked for it, whether the device waits or not
            return found.checked()
        self._tier.watch_use()
        return found
