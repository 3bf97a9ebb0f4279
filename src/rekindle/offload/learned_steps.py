"""What a lane knows of the steps it has seen, and what it expects of the next one."""

from dataclasses import replace
from typing import TYPE_CHECKING

from rekindle.offload.step_activations import Step
from rekindle.offload.step_profile import History, first_seen, measured, seen_again

if TYPE_CHECKING:
    from rekindle.offload.tiers.base import Tier

_KNOWN_STEPS = 16
"""How many steps are remembered: of several models, or of several shapes."""
_TRIALS = 8
"""How many steps are measured in a row without learning anything that can be used: a shape that
never comes again would have all the others measured for ever."""
_HARDLY = 0.02
"""The share of a step that may be spent waiting if as much was to go as costs no time."""


class Lessons:
    """Told of steps that are over; says what the next one is taken for."""

    def __init__(self, quota: float | None, tier: "Tier", hurries: bool = True) -> None:
        self._quota = quota
        self._hurries = hurries
        self._tier = tier
        self.known: list[History] = []
        """The last one first."""
        self._share: float | None = None
        """What was chosen last, as a share."""
        self._trials = _TRIALS

    @property
    def usual_quota(self) -> float:
        """For a step that is not known: the quota, or what was free in others."""
        usual = self._share if self._quota is None else self._quota
        return 1.0 if usual is None else usual

    def next_step(self) -> Step:
        """The next step, taken for the last one until it shows to be another."""
        is_measured = self._trials > 0 and not all(known.is_checked for known in self.known)
        self._trials -= is_measured
        self._tier.time_copies(is_measured)
        step = Step(self.known[0] if self.known else None, is_measured)
        if is_measured:
            step.growth = self._tier.growth()
        return step

    def learn(self, step: Step) -> None:
        """Learn from a step that is over."""
        known = next((k for k in self.known if k.sizes == tuple(step.sizes)), None)
        found = self._first(step) if known is None else self._again(known, step)
        if found.writes != step.writes:
            found = replace(found, writes=step.writes)
        self.known = [found, *(k for k in self.known if k is not known)][:_KNOWN_STEPS]

    def _first(self, step: Step) -> History:
        if step.is_measured and self._quota is None:
            self._share = measured(step.sizes, step.diary, None, self._tier).share
        return first_seen(step.sizes, step.diary, self._quota, step.were_derived, self._hurries)

    def _again(self, known: History, step: Step) -> History:
        if known.is_checked:
            return known.without(step.diary.stays)
        if not step.tells_times_of(known):
            self._trials = _TRIALS  # it comes again, so it is worth measuring
            return known.without(step.diary.stays)
        self._trials = _TRIALS
        if known.is_settled and step.diary.share_waited(self._tier) <= _HARDLY:
            self._tier.shrink()
            return known.checked()
        found = seen_again(known, step.diary, self._quota, self._tier)
        self._share = found.share
        if self._quota is not None:  # it was asked for, whether the device waits or not
            return found.checked()
        self._tier.watch_use()
        return found
