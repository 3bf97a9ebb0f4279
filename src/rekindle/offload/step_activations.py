"""The activations of one step, from the first that is saved to the last that is used."""

from collections import deque
from typing import TYPE_CHECKING, TypeAlias
from weakref import ref

from rekindle.offload.schedule import Choice, fetch_ahead, lead_of
from rekindle.offload.step_profile import Derivable, Diary, History

if TYPE_CHECKING:
    from rekindle.offload.activation import Activation

Place: TypeAlias = tuple[int, int]
"""Which op it is: the thread, and how many ops autograd had followed there."""


class Step:
    """What is saved between two backwards. Note [What a step is].

    It knows its activations weakly: they belong to autograd and die with the nodes that saved them.
    """

    def __init__(self, history: History | None, is_measured: bool) -> None:
        self.history = history
        """The step that this one repeats, as far as one can tell by now."""
        self.choice: Choice | None = history.choice if history else None
        self.is_measured = is_measured
        """Whether it is written down when things happen."""
        self.growth = 0
        """What the tier had set aside when it began."""
        self.set_memory_aside = False
        """Whether more had to be, which takes a while: its times are too long."""
        self.diary = Diary()
        self.has_turned = False
        """Whether backward has begun."""
        self.is_broken = False
        """Whether something was interrupted while it was noted down: nothing is learnt from it."""
        self.activations: list[ref[Activation]] = []
        self.derived: list[ref[Activation]] = []
        """Those that are made from others; the rest of what is here is not about them."""
        self.derivable = 0
        """How many could be, by their nodes."""
        self.were_derived: set[Derivable] = set()
        """Which of those were."""
        self.by_storage: dict[int, ref[Activation]] = {}
        self.writes: dict[int, int] = {}
        """How often each activation may have been written to between two saves, where it was."""
        self.sizes: list[int] = []
        self.largest = 0
        self.living = 0
        self.here = 0
        """Bytes on the device."""
        self.seen = self.sent = 0
        """In an unknown step: bytes that could be sent so far, and that were."""
        self.last: deque[tuple[ref[Activation], int]] = deque()
        """In an unknown step: those saved last, with their sizes; backward may want them first."""
        self.last_bytes = 0
        self.loose: list[tuple[ref[Activation], Place]] = []
        """Those to be looked at again, and where they were saved: Note [Whose tensor is it]."""
        self.turn_of: dict[int, int] = {}
        """The turn at which backward is expected to use each activation."""
        self.reached = -1
        """The last turn that has come."""
        self.coming: list[ref[Activation]] = []
        """What is on its way back, if that goes in stages."""
        self.wanted: deque[int] = deque()
        """What is to be fetched next."""

    @property
    def lead(self) -> int:
        """In an unknown step: how much is to follow an activation before it goes."""
        return 2 * self.largest

    @property
    def is_as_known(self) -> bool:
        """Whether it went as one that is known, to the end."""
        return self.history is not None and len(self.sizes) == len(self.history.sizes)

    def tells_times_of(self, known: History) -> bool:
        """Whether a step that was seen before can be judged by the times of this one."""
        is_whole = len(self.diary.uses) >= len(known.order)
        return self.is_measured and is_whole and not self.set_memory_aside

    def add(self, activation: "Activation", key: int) -> None:
        weak = ref(activation)
        self.by_storage[key] = weak
        if activation.made_from is not None:
            self.derived.append(weak)
            return
        nbytes, largest = activation.nbytes, max(self.largest, activation.nbytes)
        activation.index = len(self.activations)
        activation.counts = True  # and from here on no call, so that nothing can strike between
        self.here += nbytes
        self.activations += (weak,)
        self.sizes += (nbytes,)
        self.largest = largest

    def is_complete(self, activation: "Activation") -> bool:
        """Whether no more writes to an activation are to be expected before backward."""
        return self.history is None or activation.writes >= self.history.writes.get(
            activation.index, 0
        )

    def restart(self, index: int) -> None:
        """Another backward begins, with this activation: it may use what was used before."""
        self.reached = min(self.reached, self.turn_of.get(index, 0) - 1)

    def follow(self, known: list[History]) -> None:
        """See whether the step still goes as one that is known."""
        last = len(self.sizes) - 1
        guess = self.history
        if guess is None or (last < len(guess.sizes) and guess.sizes[last] == self.sizes[last]):
            return
        sizes = tuple(self.sizes)
        self.history = next((k for k in known if k.sizes[: len(sizes)] == sizes), None)
        self.choice = self.history.choice if self.history else None

    def line_up(self, activation: "Activation") -> "list[Activation]":
        """Those that may go, now that this one was saved: enough have followed them.

        In an unknown step any activation may be among the last, which are not to go at all.
        """
        self.last.append((ref(activation), activation.nbytes))
        self.last_bytes += activation.nbytes
        ready: list[Activation] = []
        while self.last_bytes - self.last[0][1] >= self.lead:
            weak, nbytes = self.last.popleft()
            self.last_bytes -= nbytes
            first = weak()
            if first is not None:
                ready.append(first)
        return ready

    def turn(self, known: list[History]) -> None:
        """Backward begins: from now on the order of uses counts."""
        self.last.clear()
        was_expected = self.is_as_known
        if not was_expected:  # it may have been taken for a longer one
            sizes = tuple(self.sizes)
            self.history = next((k for k in known if k.sizes == sizes), None)
        order = self.history.order if self.history else range(len(self.sizes) - 1, -1, -1)
        if not was_expected:
            living = [weak() for weak in self.activations]
            moved = frozenset(a.index for a in living if a is not None and a.copy is not None)
            fetch_at = fetch_ahead(self.sizes, order, moved)
            self.choice = Choice(moved, self.here + lead_of(self.sizes), fetch_at)
        self.turn_of = {index: turn for turn, index in enumerate(order)}
        self.has_turned = True

    def use(self, index: int) -> None:
        """Backward uses an activation: what is to be fetched by then is wanted now."""
        assert self.choice is not None, "it is made when backward begins, at the latest"
        turn = self.turn_of.get(index, -1)
        for reached in range(self.reached + 1, turn + 1):
            self.wanted.extend(self.choice.fetch_at.get(reached, ()))
        self.reached = max(self.reached, turn)
