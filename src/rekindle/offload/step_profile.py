"""What is learnt of a step: its activations in order, how backward uses them, and when.

A step is known by the sizes of its activations. The first time it is seen, its order is learnt; the
second time, with the host memory in place, its times; the third time is a check, and from then on
nothing more.

Note [What a step is]. The engine sees activations being saved and being used, not steps. All that
is saved until backward first uses one of it belongs together, across any number of `with` blocks;
what is saved after that begins a new step, and so does what follows a graph that was thrown away.
Where that guess is wrong only time is lost: nothing that is computed depends on it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rekindle.offload.schedule import Choice, Entry, Link, choose
from rekindle.offload.tiers.base import Mark, Tier

Derivable: TypeAlias = tuple[int, str, int]
"""One that could be made from others: its number among those of a step, its op, its bytes."""


@dataclass(frozen=True, eq=False)
class History:
    """A step that was seen before, and what is done when it comes again."""

    entries: tuple[Entry, ...]
    order: tuple[int, ...]
    quota: int | float | None
    link: Link | None
    is_settled: bool
    """Whether its times are known."""
    is_checked: bool
    """Whether it came again after that, and went as expected."""
    choice: Choice
    sizes: tuple[int, ...]
    derived: frozenset[Derivable]
    """Which of the activations that could be made from others gave the same bits."""
    hurries: bool = True
    writes: Mapping[int, int] = field(default_factory=dict)
    """How often each activation may have been written to between two saves, where it was: it is
    copied after the last of them. Note [What a copy stands for]."""

    @property
    def moved_bytes(self) -> int:
        return sum(self.sizes[i] for i in self.choice.moved)

    @property
    def share(self) -> float:
        return self.moved_bytes / max(sum(self.sizes), 1)

    def checked(self) -> "History":
        """The same, and there is no more to be learnt."""
        return replace(self, is_checked=True)

    def without(self, stays: set[int]) -> "History":
        """The same, but for activations that turned out to be held by somebody all along."""
        if all(self.entries[i].stays for i in stays):
            return self
        entries = [replace(e, stays=e.stays or i in stays) for i, e in enumerate(self.entries)]
        known = self.order, self.quota, self.link, self.is_settled, self.derived, self.hurries
        return replace(history_of(entries, *known), is_checked=self.is_checked)


def history_of(
    entries: Sequence[Entry],
    order: Sequence[int],
    quota: float | None,
    link: Link | None,
    is_settled: bool,
    derived: Iterable[Derivable] = (),
    hurries: bool = True,
) -> History:
    """What is known of a step, with the choice that follows from it."""
    return History(
        tuple(entries),
        tuple(order),
        quota,
        link,
        is_settled,
        False,
        choose(entries, order, quota, link, hurries),
        tuple(entry.nbytes for entry in entries),
        frozenset(derived),
        hurries,
    )


@dataclass(eq=False)
class Diary:
    """What one step's activations did, in the device's order: written down to learn from."""

    uses: list[int] = field(default_factory=list)
    stays: set[int] = field(default_factory=set)
    saved: dict[int, int] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    waits: set[int] = field(default_factory=set)
    """Which marks end a wait that the mark before began."""

    def note_saved(self, index: int, tier: Tier) -> None:
        self.saved[index] = len(self.marks)
        self.marks.append(tier.mark())

    def note_used(self, index: int, tier: Tier | None) -> None:
        """An activation is used; the first time counts. With a tier, it is noted when."""
        if index in self.used:
            return
        self.uses.append(index)
        self.used[index] = len(self.marks)
        if tier is not None:
            self.marks.append(tier.mark())

    def note_wait(self, begin: Mark, end: Mark) -> None:
        self.waits.add(len(self.marks) + 1)
        self.marks += [begin, end]

    def times(self, tier: Tier) -> list[float]:
        """Seconds at each mark, had the device never waited."""
        waited, times = 0.0, []
        for number, mark in enumerate(self.marks):
            if number in self.waits:
                waited += tier.seconds(self.marks[number - 1], mark)
            times.append(tier.seconds(self.marks[0], mark) - waited)
        return times

    def share_waited(self, tier: Tier) -> float:
        """The share of the whole time that the device waited."""
        if not self.marks:
            return 0.0
        waited = sum(tier.seconds(self.marks[i - 1], self.marks[i]) for i in self.waits)
        return waited / max(tier.seconds(self.marks[0], self.marks[-1]), 1e-9)

    def entries(self, sizes: Sequence[int], times: Sequence[float]) -> list[Entry]:
        """The activations of the step, with their times if there are any."""

        def at(marks: dict[int, int], i: int) -> float | None:
            return times[marks[i]] if i in marks and times else None

        return [
            Entry(nbytes, i in self.stays, at(self.saved, i), at(self.used, i))
            for i, nbytes in enumerate(sizes)
        ]


def first_seen(
    sizes: Sequence[int],
    diary: Diary,
    quota: float | None,
    derived: Iterable[Derivable] = (),
    hurries: bool = True,
) -> History:
    """What is known of a step after the first time: its order, and what can be made again."""
    entries = diary.entries(sizes, [])
    return history_of(entries, diary.uses, quota, None, False, derived, hurries)


def seen_again(known: History, diary: Diary, quota: float | None, tier: Tier) -> History:
    """What is known after a step was measured: its times too."""
    diary.stays.update(i for i, entry in enumerate(known.entries) if entry.stays)
    found = measured(known.sizes, diary, quota, tier, known.hurries)
    return replace(found, derived=known.derived)


def measured(
    sizes: Sequence[int], diary: Diary, quota: float | None, tier: Tier, hurries: bool = True
) -> History:
    """What a measured step tells."""
    entries = diary.entries(sizes, diary.times(tier))
    link = Link(*tier.rates())
    return history_of(entries, diary.uses, quota, link, is_settled=True, hurries=hurries)
