"""The engine of one device: what becomes of each activation from the moment autograd saves it.

A lane is told of every activation that is saved (`save`) and of every one that backward wants
(`ask`). Between the two it is here, leaving, away, coming, or here again. Memory is let go in the
device's order of work: a lane does not look whether a copy happens to be done, it makes the device
wait for the oldest ones whenever more would be there than the choice allows. So the peak does not
depend on how far Python runs ahead of the device, and is the same in every step.
"""

import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING
from weakref import WeakMethod

import torch
from torch import Tensor

from rekindle import observation
from rekindle.emptying import empty_when_backward_ends
from rekindle.errors import OffloadError
from rekindle.internals import graph_task_id, version_of, without_modes
from rekindle.offload.activation import Activation, Saved, bytes_of
from rekindle.offload.derive import derivation_of
from rekindle.offload.history import History, learn
from rekindle.offload.step import Place, Step
from rekindle.sizes import format_bytes

if TYPE_CHECKING:
    from rekindle.offload.options import Options
    from rekindle.offload.tiers import Tier

_KNOWN_STEPS = 16
"""How many steps are remembered: of several models, or of several shapes."""
_getframe = sys._getframe


class Lane:
    """All that is done for the activations of one device under one set of options."""

    def __init__(self, device: torch.device, options: "Options", tier: "Tier") -> None:
        self.device = device
        self.tier = tier
        self._options = options
        self._times_read = options.times_read
        self.departed: deque[tuple[Step, int]] = deque()
        """Activations that died, with the bytes they had here: finalizers note it, `_tidy` acts."""
        self._lock = RLock()
        self._step: Step | None = None
        self._past: list[Step] = []
        """Steps whose backward has begun and that are not all used yet, or not learnt from."""
        self._known: list[History] = []
        self._leaving: deque[Activation] = deque()
        self._leaving_bytes = 0
        self._share: float | None = None
        """What was chosen last, as a share: for steps that are not known."""
        self._has_warned = False
        self._task = -1

    def save(self, x: Tensor) -> Saved:
        """Take a tensor that autograd saves."""
        caller = _getframe(2)
        place = caller.f_code, caller.f_lasti
        with self._lock, without_modes():
            self._tidy()
            step = self._open_step()
            if step.loose and step.choice is not None:
                self._send_loose(step, running=place)
            storage = x.untyped_storage()
            known = step.by_storage.get(storage._cdata)
            activation = known() if known else None
            if activation is None or activation.version != version_of(x):
                activation = self._add(step, x, storage, place)
            return Saved(activation, x)

    def ask(self, activation: Activation) -> Tensor:
        """The bytes of an activation that backward wants, on the device."""
        with self._lock, without_modes():
            self._tidy()
            step = activation.step
            if activation.is_derived:
                return self._derive(activation)
            self._note_use(step, activation.index)
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
            step.use(activation.index)
            self._fetch_wanted(step)
            return self._take(activation) if data is None else data

    def pause(self, failed: bool) -> None:
        """A `with` block ends."""
        with self._lock, without_modes():
            self._tidy()
            step = self._step
            if step is None or step.has_turned:
                return
            self._send_loose(step)
            is_last = step.history is None or step.is_as_known
            if self.tier.waits_on_device and (failed or is_last):
                self._release_all()

    def empty(self) -> None:
        """A backward has ended: let go of what was fetched and is still away as well."""
        with self._lock:
            for step in [*self._past, *filter(None, [self._step])]:
                for weak in step.activations if step.has_turned else ():
                    activation = weak()
                    if activation is not None and activation.return_away():
                        step.here -= activation.counted

    def trim(self) -> None:
        """Give back the memory, or the disk, that no activation uses."""
        with self._lock:
            self._tidy()
            self.tier.trim()

    def _tidy(self) -> None:
        """Act on what ended since the last time."""
        while self.departed:
            step, nbytes = self.departed.popleft()
            step.living -= 1
            step.here -= nbytes
        while self._leaving:
            copy = self._leaving[0].copy
            if copy is not None and not copy.is_out():
                break
            self._release()

    def _open_step(self) -> Step:
        """The step that is being saved: Note [What a step is]."""
        step = self._step
        if step is None or step.has_turned or (step.sizes and not step.living):
            if step is not None and step.has_turned:
                self._past.append(step)
            self._learn()
            is_measured = not all(known.is_settled for known in self._known)
            step = self._step = Step(self._known[0] if self._known else None, is_measured)
            self.tier.time_copies(is_measured)
        return step

    def _learn(self) -> None:
        """Learn from the steps that are over."""
        over = [step for step in self._past if not step.living]
        self._past = [step for step in self._past if step.living]
        for step in over:
            sizes = tuple(step.sizes)
            known = next((k for k in self._known if k.sizes == sizes), None)
            if known is None or (step.is_measured and not known.is_settled):
                found = learn(known, sizes, step.diary, self._options.quota, self.tier)
            else:
                found = known.without(step.diary.stays)
            self._known = [found, *(k for k in self._known if k is not known)][:_KNOWN_STEPS]
            moved = sum(sizes[i] for i in found.choice.moved)
            if found.is_settled:
                self._share = moved / max(sum(sizes), 1)
            if found.is_settled and known is not found and not self._past:
                self.tier.shrink(max(k.moved_bytes for k in self._known))

    def _add(
        self, step: Step, x: Tensor, storage: torch.UntypedStorage, place: Place
    ) -> Activation:
        activation = Activation(self, step, x, storage)
        derivation = derivation_of(x, storage, self._times_read) if self._times_read else None
        if derivation is not None:
            activation.derive_from(derivation)
            self._count(tensors_derived=1, bytes_derived=activation.nbytes)
        step.add(activation, storage._cdata)
        if not activation.is_derived:
            self._decide(step, activation, place)
        return activation

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
            if place == running:
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
        quota = self._options.quota
        if quota is None:
            quota = 1.0 if self._share is None else self._share
        step.seen += activation.nbytes
        limit = quota * step.seen if isinstance(quota, float) else quota
        if step.sent + activation.nbytes <= limit:
            step.sent += activation.nbytes
            self._send(activation)

    def _send(self, activation: Activation) -> None:
        if activation.here is None or activation.copy is not None:
            return
        try:
            copy = self.tier.send(activation.here)
        except OSError as error:
            self._no_room(activation, error)
            return
        if copy is None:
            self._no_room(activation, None)
            return
        activation.copy = copy
        let_go = WeakMethod(activation.let_go)
        copy.when_out(lambda: (method := let_go()) and method())
        self._leaving.append(activation)
        self._leaving_bytes += activation.nbytes
        self._count(tensors_out=1, bytes_out=activation.nbytes)

    def _no_room(self, activation: Activation, error: OSError | None) -> None:
        where = "host memory" if self._options.tier == "host" else f"{self._options.directory!r}"
        reason = str(error) if error else "max_host_bytes, or what the machine has left, is reached"
        message = (
            f"There is no room in {where} for an activation of {format_bytes(activation.nbytes)}: "
            f"{reason}."
        )
        if self._options.on_full == "raise":
            raise OffloadError(
                f"{message} Make room, offload less (quota=…), or keep what does not fit on the "
                'device with on_full="keep".'
            ) from error
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"rekindle.offload: {message} It stays on the device, and so will others.",
                stacklevel=3,
            )

    def _stay_below_ceiling(self, step: Step) -> None:
        """Have the device wait for copies until no more activations are there than should be."""
        if step.choice is None:
            while self._leaving and self._leaving_bytes > step.lead:
                self._release(wait_in=step)
        else:
            while self._leaving and step.here > step.choice.ceiling:
                self._release(wait_in=step)

    def _release_all(self) -> None:
        while self._leaving:
            self._release(wait_in=self._step)

    def _release(self, wait_in: Step | None = None) -> None:
        """Let go of the activation that began to leave first; after waiting for it, if need be."""
        activation = self._leaving.popleft()
        self._leaving_bytes -= activation.nbytes
        copy = activation.copy
        if copy is None:
            return
        try:
            if wait_in is None:
                copy.check_out()
            else:
                with self._waiting(wait_in):
                    copy.wait_out()
        except OSError as error:
            activation.copy = None
            copy.close()
            self._no_room(activation, error)
            return
        activation.let_go()
        activation.step.here -= activation.nbytes

    def _note_use(self, step: Step, index: int) -> None:
        if not step.has_turned:
            self._send_loose(step)
            if self.tier.waits_on_device:
                self._release_all()
            step.turn()
        step.diary.note_used(index, self.tier if step.is_measured else None)
        task = graph_task_id()
        if task not in (-1, self._task):
            self._task = task
            empty_when_backward_ends(self)

    def _fetch(self, activation: Activation) -> bool:
        assert activation.copy is not None, "what is away has a copy"
        if not activation.copy.fetch():
            return False
        if not activation.is_coming:
            activation.is_coming = True
            activation.step.here += activation.nbytes
            self._count(tensors_in=1, bytes_in=activation.nbytes)
        return True

    def _fetch_wanted(self, step: Step) -> None:
        """Begin to bring back what backward uses next, as much as may be there at a time."""
        assert step.choice is not None, "it is made when backward begins, at the latest"
        while step.wanted:
            activation = step.activations[step.wanted[0]]()
            if activation is not None and activation.is_away():
                if step.here + activation.nbytes > step.choice.ceiling:
                    return
                if not self._fetch(activation):
                    return
            step.wanted.popleft()

    def _take(self, activation: Activation) -> Tensor:
        assert activation.copy is not None, "what is coming has a copy"
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
    def _waiting(self, step: Step) -> Iterator[None]:
        """Measure a wait, if anybody wants to know."""
        if not (step.is_measured or observation.active):
            yield
            return
        begin = self.tier.mark()
        yield
        end = self.tier.mark()
        if step.is_measured:
            step.diary.note_wait(begin, end)
        for seen in observation.active:
            seen.traffic(self._options.tier).add_wait(self.tier.seconds, begin, end)

    def _count(self, **counts: int) -> None:
        for seen in observation.active:
            seen.traffic(self._options.tier).add(self.tier.pool_bytes, **counts)
