"""Profiles of steps: their activations in order, how backward uses them, and when.

A step is known by the sizes of its activations. The first time it is seen, its order is learnt; the
second time, with the host memory in place, its times; the third time is a check, and from then on
nothing more.

Note [What a step is]. An offloader sees activations being saved and being used, not steps. All that
is saved until backward first uses one of it belongs together, across any number of `with` blocks;
what is saved after that begins a new step, and so does what follows a graph that was thrown away.
Where that guess is wrong only time is lost: nothing that is computed depends on it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rekindle.offload.schedule import ActivationTimes, LinkRates, Schedule, make_schedule
from rekindle.offload.tiers.base import Mark, Tier

DerivableKey: TypeAlias = tuple[int, str, int]
"""An activation that one op could make: its number among those of a step, its op, its bytes."""


@dataclass(frozen=True, eq=False)
class StepProfile:
    """A step that was seen before, and its schedule for when it comes again."""

    entries: tuple[ActivationTimes, ...]
    order: tuple[int, ...]
    """Indices of activations, in the order in which backward first uses them."""
    quota: int | float | None
    rates: LinkRates | None
    is_timed: bool
    """True if its times are known."""
    is_checked: bool
    """True if it came again after that, and went as expected."""
    schedule: Schedule
    sizes: tuple[int, ...]
    derived: frozenset[DerivableKey]
    """Activations that one op was seen to make again bit for bit."""
    limit_in_flight: bool = True
    writes: Mapping[int, int] = field(default_factory=dict)
    """By index: how often an activation may have been written to between two saves. It is copied
    after the last of them. Note [What a copy stands for]."""

    @property
    def moved_bytes(self) -> int:
        return sum(self.sizes[i] for i in self.schedule.moved)

    @property
    def share(self) -> float:
        return self.moved_bytes / max(sum(self.sizes), 1)

    def checked(self) -> "StepProfile":
        """Returns this profile, marked as checked: nothing more is to be learnt."""
        return replace(self, is_checked=True)

    def with_staying(self, stays: set[int]) -> "StepProfile":
        """Returns this profile, scheduled anew without activations that somebody else holds."""
        if all(self.entries[i].stays for i in stays):
            return self
        entries = [replace(e, stays=e.stays or i in stays) for i, e in enumerate(self.entries)]
        known = self.order, self.quota, self.rates, self.is_timed, self.derived
        found = make_profile(entries, *known, self.limit_in_flight)
        return replace(found, is_checked=self.is_checked)


def make_profile(
    entries: Sequence[ActivationTimes],
    order: Sequence[int],
    quota: float | None,
    rates: LinkRates | None,
    is_timed: bool,
    derived: Iterable[DerivableKey] = (),
    limit_in_flight: bool = True,
) -> StepProfile:
    """Returns a profile, with the schedule that follows from it."""
    return StepProfile(
        tuple(entries),
        tuple(order),
        quota,
        rates,
        is_timed,
        False,
        make_schedule(entries, order, quota, rates, limit_in_flight),
        tuple(entry.nbytes for entry in entries),
        frozenset(derived),
        limit_in_flight,
    )


@dataclass(eq=False)
class StepRecord:
    """Events of one step in the device's order of work, recorded to learn from."""

    uses: list[int] = field(default_factory=list)
    """Indices of activations, in the order in which backward first used them."""
    stays: set[int] = field(default_factory=set)
    """Indices of activations that somebody else was seen to hold."""
    saved: dict[int, int] = field(default_factory=dict)
    """By index of an activation: the index of the mark of its save."""
    used: dict[int, int] = field(default_factory=dict)
    """By index of an activation: the index of the mark of its first use."""
    marks: list[Mark] = field(default_factory=list)
    waits: set[int] = field(default_factory=set)
    """Indices of marks that end a wait which the mark before began."""

    def note_saved(self, index: int, tier: Tier) -> None:
        """Record the time at which an activation is saved."""
        self.saved[index] = len(self.marks)
        self.marks.append(tier.mark())

    def note_used(self, index: int, tier: Tier | None) -> None:
        """Record the first use of an activation; with a tier, also the time."""
        if index in self.used:
            return
        self.uses.append(index)
        self.used[index] = len(self.marks)
        if tier is not None:
            self.marks.append(tier.mark())

    def note_wait(self, begin: Mark, end: Mark) -> None:
        """Record that the device waited for a copy."""
        self.waits.add(len(self.marks) + 1)
        self.marks += [begin, end]

    def times(self, tier: Tier) -> list[float]:
        """Returns the seconds at each mark, had the device never waited."""
        waited, times = 0.0, []
        for number, mark in enumerate(self.marks):
            if number in self.waits:
                waited += tier.seconds(self.marks[number - 1], mark)
            times.append(tier.seconds(self.marks[0], mark) - waited)
        return times

    def share_waited(self, tier: Tier) -> float:
        """Returns the share of the step's time that the device waited."""
        if not self.marks:
            return 0.0
        waited = sum(tier.seconds(self.marks[i - 1], self.marks[i]) for i in self.waits)
        return waited / max(tier.seconds(self.marks[0], self.marks[-1]), 1e-9)

    def entries(self, sizes: Sequence[int], times: Sequence[float]) -> list[ActivationTimes]:
        """Returns the activations of the step, with their times if there are any."""

        def at(marks: dict[int, int], i: int) -> float | None:
            return times[marks[i]] if i in marks and times else None

        return [
            ActivationTimes(nbytes, i in self.stays, at(self.saved, i), at(self.used, i))
            for i, nbytes in enumerate(sizes)
        ]


def profile_of_first(
    sizes: Sequence[int],
    record: StepRecord,
    quota: float | None,
    derived: Iterable[DerivableKey] = (),
    limit_in_flight: bool = True,
) -> StepProfile:
    """Returns what is known of a step after its first time: its order, and what can be derived."""
    entries = record.entries(sizes, [])
    return make_profile(entries, record.uses, quota, None, False, derived, limit_in_flight)


def profile_of_repeat(
    known: StepProfile, record: StepRecord, quota: float | None, tier: Tier
) -> StepProfile:
    """Returns what is known of a step after it was measured: its times too."""
    record.stays.update(i for i, entry in enumerate(known.entries) if entry.stays)
    found = measured_profile(known.sizes, record, quota, tier, known.limit_in_flight)
    return replace(found, derived=known.derived)


def measured_profile(
    sizes: Sequence[int],
    record: StepRecord,
    quota: float | None,
    tier: Tier,
    limit_in_flight: bool = True,
) -> StepProfile:
    """Returns the profile that the times of one step give."""
    entries = record.entries(sizes, record.times(tier))
    rates = LinkRates(*tier.rates())
    return make_profile(
        entries, record.uses, quota, rates, is_timed=True, limit_in_flight=limit_in_flight
    )
