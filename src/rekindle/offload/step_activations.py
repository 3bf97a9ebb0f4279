"""The activations of one training step, from the first that is saved to the last that is used."""

from collections import deque
from typing import TYPE_CHECKING, TypeAlias
from weakref import ref

from rekindle.offload.residency import ON_DEVICE
from rekindle.offload.schedule import Schedule, bytes_in_flight, prefetch_ahead
from rekindle.offload.step_profile import DerivableKey, StepProfile, StepRecord

if TYPE_CHECKING:
    from rekindle.offload.activation import Activation

OpPosition: TypeAlias = tuple[int, int]
"""Identifies the op that saves: the thread, and how many nodes autograd had made there."""


class StepActivations:
    """The activations saved between two backwards. Note [What a step is].

    It holds them weakly: they belong to autograd and die with the nodes that saved them.
    """

    def __init__(self, profile: StepProfile | None, is_measured: bool) -> None:
        self.profile = profile
        """The known step that this one repeats, as far as one can tell by now."""
        self.schedule: Schedule | None = profile.schedule if profile else None
        self.is_measured = is_measured
        """True if times are recorded."""
        self.tier_growth = 0
        """The tier's `growth()` when the step began."""
        self.grew_memory = False
        """True if memory had to be allocated, which takes a while: its times are too long."""
        self.record = StepRecord()
        self.backward_started = False
        self.interrupted = False
        """True if an interrupt hit its bookkeeping: nothing is learnt from it."""
        self.activations: list[ref[Activation]] = []
        """Activations that can be copied out, by their index."""
        self.derived: list[ref[Activation]] = []
        """Activations that are derived from other saved tensors. They have no index."""
        self.derivable_count = 0
        """Number of activations that one op could make, going by their nodes."""
        self.derived_keys: set[DerivableKey] = set()
        """Keys of those of them that are derived."""
        self.by_storage: dict[int, ref[Activation]] = {}
        self.writes: dict[int, int] = {}
        """By index: how often an activation may have been written to between two saves."""
        self.sizes: list[int] = []
        self.largest = 0
        self.alive = 0
        """Number of activations that are not dead, derived ones included."""
        self.device_bytes = 0
        """Bytes of its activations on the device."""
        self.offered_bytes = self.copied_bytes = 0
        """In an unknown step: bytes that could be copied out so far, and that were."""
        self._recent: deque[tuple[ref[Activation], int]] = deque()
        """In an unknown step: those saved last, with their sizes; backward may want them first."""
        self._recent_bytes = 0
        self.owner_unknown: list[tuple[ref[Activation], OpPosition]] = []
        """Activations to look at again, and the op that saved each: Note [Whose tensor is it]."""
        self._position_of: dict[int, int] = {}
        """By index: the position in backward at which an activation is expected to be used."""
        self._position = -1
        """The last position that backward has reached."""
        self.returning: list[ref[Activation]] = []
        """Activations on their way back, if the tier copies back in stages."""
        self.to_prefetch: deque[int] = deque()
        """Indices of activations to copy back next."""

    @property
    def lead(self) -> int:
        """In an unknown step: bytes that have to follow an activation before it is copied out."""
        return 2 * self.largest

    @property
    def is_as_known(self) -> bool:
        """True if it went as a known step, to the end."""
        return self.profile is not None and len(self.sizes) == len(self.profile.sizes)

    def has_times_of(self, known: StepProfile) -> bool:
        """True if the times of this step are those of the known step, undisturbed."""
        is_whole = len(self.record.uses) >= len(known.order)
        return self.is_measured and is_whole and not self.grew_memory

    def add(self, activation: "Activation", key: int) -> None:
        """Add an activation that was just saved; `key` is that of its storage."""
        weak = ref(activation)
        self.by_storage[key] = weak
        if activation.derivation is not None:
            self.derived.append(weak)
            return
        nbytes, largest = activation.nbytes, max(self.largest, activation.nbytes)
        activation.index = len(self.activations)
        activation.is_counted = True  # and from here on no call, so that nothing can strike between
        self.device_bytes += nbytes
        self.activations += (weak,)
        self.sizes += (nbytes,)
        self.largest = largest

    def is_complete(self, activation: "Activation") -> bool:
        """True if no more writes to an activation are expected before backward."""
        return self.profile is None or activation.writes >= self.profile.writes.get(
            activation.index, 0
        )

    def match_known(self, known: list[StepProfile]) -> None:
        """Compare the last saved size with the known step; on a mismatch look for another one."""
        last = len(self.sizes) - 1
        guess = self.profile
        if guess is None or (last < len(guess.sizes) and guess.sizes[last] == self.sizes[last]):
            return
        sizes = tuple(self.sizes)
        self.profile = next((k for k in known if k.sizes[: len(sizes)] == sizes), None)
        self.schedule = self.profile.schedule if self.profile else None

    def add_recent(self, activation: "Activation") -> "list[Activation]":
        """Add to the recent activations; returns those that may leave, as enough was saved since.

        Any activation of an unknown step may be among the last, which are not to leave at all.
        """
        self._recent.append((ref(activation), activation.nbytes))
        self._recent_bytes += activation.nbytes
        ready: list[Activation] = []
        while self._recent_bytes - self._recent[0][1] >= self.lead:
            weak, nbytes = self._recent.popleft()
            self._recent_bytes -= nbytes
            first = weak()
            if first is not None:
                ready.append(first)
        return ready

    def fix_schedule(self, known: list[StepProfile]) -> None:
        """Fix the order of uses as backward begins, and the schedule if the step is not known."""
        self._recent.clear()
        was_expected = self.is_as_known
        if not was_expected:  # it may have been taken for a longer one
            sizes = tuple(self.sizes)
            self.profile = next((k for k in known if k.sizes == sizes), None)
        order = self.profile.order if self.profile else range(len(self.sizes) - 1, -1, -1)
        if not was_expected:
            alive = [weak() for weak in self.activations]
            moved = frozenset(
                a.index for a in alive if a is not None and a.residency is not ON_DEVICE
            )
            prefetch_at = prefetch_ahead(self.sizes, order, moved)
            ceiling = self.device_bytes + bytes_in_flight(self.sizes)
            self.schedule = Schedule(moved, ceiling, prefetch_at)
        self._position_of = {index: position for position, index in enumerate(order)}
        self.backward_started = True

    def rewind_to(self, index: int) -> None:
        """Go back to the position of an activation with which another backward begins."""
        self._position = min(self._position, self._position_of.get(index, 0) - 1)

    def note_use(self, index: int) -> None:
        """Queue what is to be prefetched by the time backward uses this activation."""
        assert self.schedule is not None, "it is made when backward begins, at the latest"
        position = self._position_of.get(index, -1)
        for reached in range(self._position + 1, position + 1):
            self.to_prefetch.extend(self.schedule.prefetch_at.get(reached, ()))
        self._position = max(self._position, position)
