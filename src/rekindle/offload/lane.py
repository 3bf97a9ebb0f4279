"""The engine of one device: what becomes of each activation from the moment autograd saves it.

A lane is told of every activation that is saved (`save`) and of every one that backward wants
(`ask`). Between the two it is here, leaving, away, coming, or here again. Memory is let go in the
device's order of work: what has left by now is let go, and whenever more would be there than the
choice allows, the device is made to wait for the oldest copies. So the peak does not depend on how
far Python runs ahead of the device, and is never higher than chosen.
"""

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import RLock, get_ident
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rekindle import observation
from rekindle.emptying import empty_when_backward_ends
from rekindle.errors import OffloadError
from rekindle.internals import graph_task_id, version_of, without_modes
from rekindle.offload.activation import Activation, Saved, bytes_of
from rekindle.offload.departures import Departures
from rekindle.offload.derive import Derivation, derivation_of, is_made_by_its_node
from rekindle.offload.history import History, first_seen, measured, seen_again
from rekindle.offload.step import Place, Step
from rekindle.sizes import format_bytes

if TYPE_CHECKING:
    from rekindle.offload.options import Options
    from rekindle.offload.tiers import Tier

_KNOWN_STEPS = 16
"""How many steps are remembered: of several models, or of several shapes."""
_TRIALS = 8
_getframe = sys._getframe


class Lane:
    """All that is done for the activations of one device under one set of options."""

    def __init__(self, device: torch.device, options: "Options", tier: "Tier") -> None:
        self.device = device
        self.tier = tier
        self._options = options
        self.departed: deque[tuple[Step, int]] = deque()
        """Activations that died, with the bytes they had here: finalizers note it, `_tidy` acts."""
        self._lock = RLock()
        self._step: Step | None = None
        self._past: list[Step] = []
        """Steps whose backward has begun and that are not all used yet, or not learnt from."""
        self._known: list[History] = []
        self._leaving = Departures(tier, options, self._waiting)
        self._share: float | None = None
        """What was chosen last, as a share: for steps that are not known."""
        self._trials = _TRIALS
        """How many more steps are measured before one of them has led somewhere."""
        self._task = -1

    def save(self, x: Tensor) -> Saved:
        """Take a tensor that autograd saves."""
        place = _place()
        with self._lock, without_modes():
            self._tidy()
            step = self._open_step()
            if step.loose and step.choice is not None:
                self._send_loose(step, running=place)
            storage = x.untyped_storage()
            known = step.by_storage.get(storage._cdata)
            activation = known() if known else None
            if activation is None or not self._is_same(activation, x):
                activation = self._add(step, x, storage, place)
            return Saved(activation, x)

    def _is_same(self, activation: Activation, x: Tensor) -> bool:
        """Whether an activation of the same storage stands for this tensor too.

        What is made again needs its node's inputs unchanged; a detached tensor does not.
        """
        if activation.version != version_of(x):
            return False
        return not activation.is_derived or is_made_by_its_node(x)

    def ask(self, activation: Activation) -> Tensor:
        """The bytes of an activation that backward wants, on the device."""
        with self._lock, without_modes():
            self._tidy()
            step = activation.step
            if activation.is_derived:
                return self._derive(activation)
            self._note_use(step, activation.index)
            step.use(activation.index)
            data = activation.here
            if data is None:
                storage = activation.held_elsewhere()
                if storage is not None:
                    step.diary.stays.add(activation.index)
                    return bytes_of(storage, self.device)
                self._count(prefetch_hits=activation.is_coming)
                if not activation.is_coming:
                    self._count(prefetch_misses=1)
                    self._fetch(activation)
            self._fetch_wanted(step)
            return self._take(activation) if data is None else data

    def pause(self, failed: bool) -> None:
        """A `with` block ends."""
        with self._lock, without_modes():
            if failed:
                self._give_up()
                return
            self._tidy()
            step = self._step
            if step is None or step.has_turned:
                return
            self._send_loose(step)
            if self.tier.waits_on_device and step.choice is None:
                self._release_all()

    def _give_up(self) -> None:
        """A forward has failed: let go of what it sent, and add no error to the one there is."""
        while self._leaving and self.tier.waits_on_device:
            with suppress(OffloadError):
                self._leaving.release_first(self._step)

    def empty(self) -> None:
        """A backward has ended: let go of what was fetched and is still away as well."""
        with self._lock:
            for step in [*self._past, *filter(None, [self._step])]:
                if not step.has_turned:
                    continue
                for weak in [*step.activations, *step.derived]:
                    activation = weak()
                    if activation is None:
                        continue
                    if activation.is_coming:  # for a backward that is still to come, perhaps
                        step.wanted.append(activation.index)
                    if activation.return_away():
                        step.here -= activation.counted

    def trim(self) -> None:
        """Give back the memory, or the disk, that no activation uses."""
        with self._lock:
            self._tidy()
            self.tier.trim()

    def _tidy(self) -> None:
        """Act on what ended since the last time."""
        self._leaving.release_finished()
        while self.departed:
            step, nbytes = self.departed.popleft()
            step.living -= 1
            step.here -= nbytes

    def _open_step(self) -> Step:
        """The step that is being saved: Note [What a step is]."""
        step = self._step
        if step is None or step.has_turned or (step.sizes and not step.living):
            if step is not None and step.has_turned:
                self._past.append(step)
            self._learn()
            is_measured = self._trials > 0 and not all(k.is_settled for k in self._known)
            self._trials -= is_measured
            step = self._step = Step(self._known[0] if self._known else None, is_measured)
            self.tier.time_copies(is_measured)
        return step

    def _learn(self) -> None:
        """Learn from the steps that are over."""
        over = [step for step in self._past if not step.living]
        self._past = [step for step in self._past if step.living]
        for step in over:
            sizes, diary = tuple(step.sizes), step.diary
            known = next((k for k in self._known if k.sizes == sizes), None)
            if known is None:
                if step.is_measured:
                    self._share = measured(sizes, diary, self._options.quota, self.tier).share
                found = first_seen(sizes, diary, self._quota, step.were_derived)
            elif not known.is_settled and step.tells_times_of(known):
                found = seen_again(known, diary, self._options.quota, self.tier)
                self._share, self._trials = found.share, _TRIALS
            else:
                found = known.without(diary.stays)
                if not known.is_settled:  # it comes again, so it is worth measuring
                    self._trials = _TRIALS
            self._known = [found, *(k for k in self._known if k is not known)][:_KNOWN_STEPS]
            if found.is_settled and found is not known and not self._past:
                self.tier.shrink(max(k.moved_bytes for k in self._known))

    @property
    def _quota(self) -> int | float | None:
        """The quota; for steps whose times are not known, what was free in others like them."""
        return self._share if self._options.quota is None else self._options.quota

    def _add(
        self, step: Step, x: Tensor, storage: torch.UntypedStorage, place: Place
    ) -> Activation:
        activation = Activation(self, step, x, storage)
        derivation = derivation_of(x, storage) if self._options.derive else None
        if derivation is not None and self._is_trusted(step, derivation, activation):
            activation.derive_from(derivation)
            self._count(tensors_derived=1, bytes_derived=activation.nbytes)
        step.add(activation, storage._cdata)
        if not activation.is_derived:
            self._decide(step, activation, place)
        return activation

    def _is_trusted(self, step: Step, derivation: Derivation, activation: Activation) -> bool:
        """Whether the bits will be the same: Note [When a node tells the whole truth]."""
        number = step.derivable
        step.derivable += 1
        assert activation.here is not None, "it was just saved"
        if step.history is not None:
            is_trusted = number in step.history.derived
        else:
            is_trusted = derivation.gives(activation.here)
        if is_trusted:
            step.were_derived.add(number)
        return is_trusted

    def _decide(self, step: Step, activation: Activation, place: Place) -> None:
        """Send an activation that was just saved, or see later."""
        step.follow(self._known)
        if step.is_measured:
            step.diary.note_saved(activation.index, self.tier)
        if step.choice is None:
            if activation.is_loose:
                step.loose.append((activation.weak(), place))
            else:
                for ready in step.line_up(activation):
                    self._send_within_quota(step, ready)
        elif activation.index in step.choice.moved:
            if activation.is_loose:
                step.loose.append((activation.weak(), place))
            else:
                self._send(activation)
        self._stay_below_ceiling(step)

    def _send_loose(self, step: Step, running: Place | None = None) -> None:
        """Send what may not belong to anybody else, unless the op that saved it may still run."""
        later = []
        for weak, place in step.loose:
            activation = weak()
            if activation is None:
                continue
            if place == running or place[0] != get_ident():
                later.append((weak, place))
            elif step.choice is not None:
                self._send(activation)
            elif activation.is_left_to_us():
                self._send_within_quota(step, activation)
            else:
                step.diary.stays.add(activation.index)
        step.loose = later

    def _send_within_quota(self, step: Step, activation: Activation) -> None:
        """In an unknown step: send an activation if enough stayed before it."""
        quota = 1.0 if self._quota is None else self._quota
        step.seen += activation.nbytes
        limit = round(quota * step.seen) if isinstance(quota, float) else quota
        if step.sent + activation.nbytes <= limit:
            self._send(activation)

    def _send(self, activation: Activation) -> None:
        step, pool_bytes = activation.step, self.tier.pool_bytes
        if self._leaving.send(activation):
            step.sent += activation.nbytes
            self._count(tensors_out=1, bytes_out=activation.nbytes)
        step.set_memory_aside |= self.tier.pool_bytes != pool_bytes

    def _stay_below_ceiling(self, step: Step) -> None:
        """Have the device wait for copies until no more activations are there than should be."""
        if step.choice is None:
            while self._leaving.nbytes > step.lead:
                self._leaving.release_first(step)
        else:
            while self._leaving and step.here > step.choice.ceiling:
                self._leaving.release_first(step)

    def _release_all(self) -> None:
        while self._leaving:
            self._leaving.release_first(self._step)

    def _note_use(self, step: Step, index: int) -> None:
        if not step.has_turned:
            self._send_loose(step)
            if self.tier.waits_on_device:
                self._release_all()
            step.turn(self._known)
        step.diary.note_used(index, self.tier if step.is_measured else None)
        task = graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            empty_when_backward_ends(self)
            step.restart(index)

    def _fetch(self, activation: Activation) -> bool:
        assert activation.copy is not None, "what is away has a copy"
        try:
            if not activation.copy.fetch():
                return False
        except OSError:  # will show when it is taken
            return False
        self._note_coming(activation)
        return True

    def _note_coming(self, activation: Activation) -> None:
        if not activation.is_coming:
            activation.is_coming = True
            activation.step.here += activation.nbytes
            self._count(tensors_in=1, bytes_in=activation.nbytes)

    def _fetch_wanted(self, step: Step) -> None:
        """Begin to bring back what backward uses next, as much as may be there at a time."""
        assert step.choice is not None, "it is made when backward begins, at the latest"
        while step.wanted:
            activation = step.activations[step.wanted[0]]()
            if activation is not None and not activation.stay() and activation.is_wanted():
                if step.here + activation.nbytes > step.choice.ceiling:
                    return
                if not self._fetch(activation):
                    return
            step.wanted.popleft()

    def _take(self, activation: Activation) -> Tensor:
        assert activation.copy is not None, "what is coming has a copy"
        self._note_coming(activation)
        try:
            with self._waiting(activation.step):
                data = activation.copy.take()
        except OSError as error:
            raise OffloadError(
                f"An activation of {format_bytes(activation.nbytes)} could not be read back from "
                f"{self._options.directory!r}: {error}."
            ) from error
        activation.is_coming = False
        activation.here = data
        return data

    def _derive(self, activation: Activation) -> Tensor:
        """The bytes of an activation that is made from others."""
        if activation.here is not None:
            return activation.here
        storage = activation.held_elsewhere()
        if storage is not None:
            return bytes_of(storage, self.device)
        assert activation.copy is not None, "what is derived knows how"
        activation.here = activation.copy.take()
        return activation.here

    @contextmanager
    def _waiting(self, step: Step | None) -> Iterator[None]:
        """Measure a wait, if anybody wants to know."""
        is_measured = step is not None and step.is_measured
        if not (is_measured or observation.active):
            yield
            return
        begin = self.tier.mark()
        yield
        end = self.tier.mark()
        if step is not None and step.is_measured:
            step.diary.note_wait(begin, end)
        for seen in observation.active:
            seen.traffic(self._options.tier).add_wait(self.tier.seconds, begin, end)

    def _count(self, **counts: int) -> None:
        for seen in observation.active:
            seen.traffic(self._options.tier).add(self.tier.pool_bytes, **counts)


def _place() -> Place:
    """Where the op was called that saves just now; autograd's own threads run no code of Python."""
    try:
        caller = _getframe(3)
    except ValueError:
        return get_ident(), None, 0
    return get_ident(), caller.f_code, caller.f_lasti
