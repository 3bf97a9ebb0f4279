"""The engine of one device: what becomes of each activation from the moment autograd saves it.

A lane is told of every activation that is saved (`save`) and of every one that backward wants
(`ask`). Between the two it is here, leaving, away, coming, or here again. Memory is let go in the
device's order of work: what has left by now is let go, and whenever more would be there than the
choice allows, the device is made to wait for the oldest copies. So the peak does not depend on how
far Python runs ahead of the device. What backward asks for before it was fetched, and what is made
again, comes on top.
"""

from collections import deque
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from rekindle import observation
from rekindle.errors import OffloadError
from rekindle.offload.activation import Activation, Kept, Saved, bytes_of
from rekindle.offload.copy_out_queue import Departures
from rekindle.offload.derive import Derivation, derivation_of, is_made_by_its_node
from rekindle.offload.device_waits import Waits
from rekindle.offload.learned_steps import Lessons
from rekindle.offload.step_activations import Place, Step
from rekindle.regions.backward_cleanup import empty_when_backward_ends
from rekindle.sizes import format_bytes
from rekindle.torch_private.autograd_graph import graph_task_id, nodes_so_far
from rekindle.torch_private.dispatch_modes import below_modes
from rekindle.torch_private.storages import storage_key

if TYPE_CHECKING:
    from rekindle.offload.offload_options import Options
    from rekindle.offload.tiers.base import Tier


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
        """Steps whose backward has begun and whose activations are not all dead."""
        self._lessons = Lessons(options.quota, tier, options.hurries)
        self._waits = Waits(tier, options)
        self._leaving = Departures(tier, options, self._waits)
        self._backwards: dict[int, _Backward] = {}

    def save(self, x: Tensor, is_ours: bool = False) -> Saved:
        """Take a tensor that autograd saves."""
        place = _place()
        with self._lock, below_modes():
            try:
                self._tidy()
                step = self._open_step()
                if step.loose:
                    self._send_loose(step, running=place)
                storage = x.untyped_storage()
                known = step.by_storage.get(storage_key(storage))
                activation = known() if known else None
                if activation is None or not _can_stand_for(activation, x, storage):
                    activation = self._add(step, x, storage, place, is_ours)
                elif not activation.is_known(x):
                    self._copy_again(step, activation, x, storage, place)
                return Saved(activation, x)
            except BaseException as error:
                self._note_failure(error, self._step)
                raise

    def ask(self, activation: Activation) -> Tensor:
        """The bytes of an activation that backward wants, on the device."""
        with self._lock, below_modes():
            try:
                return self._ask(activation.step, activation)
            except BaseException as error:
                self._note_failure(error, activation.step)
                raise

    def _ask(self, step: Step, activation: Activation) -> Tensor:
        self._tidy()
        self._note_backward(step, activation)
        if activation.made_from is None:
            step.diary.note_used(activation.index, self.tier if step.is_measured else None)
            step.use(activation.index)
        data = activation.here
        if data is not None:
            if activation.was_away:
                self.tier.join(data, activation.came_to)
            self._fetch_wanted(step)
            return data
        storage = activation.held_elsewhere()
        if storage is not None:
            if activation.made_from is None:
                step.diary.stays.add(activation.index)
            return bytes_of(storage, self.device)
        if activation.made_from is not None:
            made = activation.made_from.make("derive=False keeps or sends that one instead.")
            data = bytes_of(made.untyped_storage(), self.device)
        else:
            data = self._bring_back(step, activation)
        came_to = self.tier.place()
        activation.came_to = came_to
        activation.here = data
        return data

    def _note_failure(self, error: BaseException, step: Step | None) -> None:
        """Begin anew with the next step if something was interrupted, which may be half done.

        What was saved stays readable: an activation and its step need nothing of the lane's.
        """
        if step is not None and not isinstance(error, Exception):
            step.is_broken = True
            if self._step is step:
                self._step = None

    def pause(self, failed: bool) -> None:
        """A `with` block ends."""
        with self._lock, below_modes():
            try:
                self._pause(failed)
            except BaseException as error:
                self._note_failure(error, self._step)
                raise

    def _pause(self, failed: bool) -> None:
        if failed:  # let go of what it sent; of errors there is one already
            while self._leaving and self.tier.waits_on_device:
                self._leaving.release_first(None)
            return
        self._tidy()
        step = self._step
        if step is None or step.has_turned:
            return
        self._send_loose(step)
        if self.tier.waits_on_device and step.choice is None:
            self._release_all()

    def begin_backward(self) -> None:
        """The backward begins, and may ask for something of this lane only later."""
        with self._lock, below_modes():
            self._tidy()
            step = self._step
            if step is not None and step.sizes and not step.has_turned:
                self._turn(step)

    def empty(self, steps: "set[Step]") -> None:
        """A backward has ended: let go of what was brought back and can be brought back again."""
        with self._lock:
            for step in steps:
                for weak in [*step.activations, *step.derived]:
                    activation = weak()
                    if activation is None:
                        continue
                    if activation.is_coming:  # for a backward that is still to come, perhaps
                        step.wanted.append(activation.index)
                    activation.return_away()

    def trim(self) -> None:
        """Give back the memory, or the disk, that no activation uses."""
        with self._lock:
            self._tidy()
            self.tier.trim()

    def _tidy(self) -> None:
        """Act on what ended since the last time."""
        self._leaving.release_finished()
        while self.departed:
            step, nbytes = self.departed[0]
            step.living -= 1
            step.here -= nbytes
            self.departed.popleft()

    def _open_step(self) -> Step:
        """The step that is being saved: Note [What a step is]."""
        step = self._step
        if step is None or step.has_turned or (step.sizes and not step.living):
            seen = [*self._past, *([step] if step is not None and step.has_turned else [])]
            self._past = [past for past in seen if past.living]
            self._step = None
            for past in seen:
                if not (past.living or past.is_broken):
                    self._lessons.learn(past)
            step = self._step = self._lessons.next_step()
        return step

    def _add(
        self,
        step: Step,
        x: Tensor,
        storage: torch.UntypedStorage,
        place: Place,
        is_ours: bool,
    ) -> Activation:
        activation = Activation(self, step, x, storage, is_ours)
        derives = self._options.derive
        derivation = derivation_of(x, storage, self._may_give) if derives else None
        if derivation is not None and self._is_trusted(step, derivation, activation):
            activation.derive_from(derivation)
            self._count(tensors_derived=1, bytes_derived=activation.nbytes)
        step.add(activation, storage_key(storage))
        if activation.made_from is None:
            self._decide(step, activation, place)
        return activation

    def _copy_again(
        self,
        step: Step,
        activation: Activation,
        x: Tensor,
        storage: torch.UntypedStorage,
        place: Place,
    ) -> None:
        """Have no copy but one that is begun from now on: Note [What a copy stands for]."""
        activation.note_written(x)
        step.writes[activation.index] = activation.writes
        if activation.copy is not None:
            activation.recall(storage)
            step.sent -= activation.nbytes
            step.seen -= activation.nbytes
        elif step.choice is None:
            return  # it goes when enough has followed it, or stays
        activation.saved_on = self.tier.place()
        self._decide(step, activation, place)

    def _may_give(self, saved: Any) -> bool:
        """Whether an activation may be made from it.

        Not from another lane's: two that ask each other could wait for each other for ever.
        """
        is_own = isinstance(saved, Saved) and saved.activation.lane is self
        return is_own or isinstance(saved, Kept)

    def _is_trusted(self, step: Step, derivation: Derivation, activation: Activation) -> bool:
        """Whether the bits will be the same: Note [When a node tells the whole truth]."""
        derivable = step.derivable, derivation.name, activation.nbytes
        step.derivable += 1
        assert activation.here is not None, "it was just saved"
        if step.history is not None:
            is_trusted = derivable in step.history.derived
        else:
            is_trusted = derivation.gives(activation.here)
        if is_trusted:
            step.were_derived.add(derivable)
        return is_trusted

    def _decide(self, step: Step, activation: Activation, place: Place) -> None:
        """Send an activation that was just saved, or see later."""
        step.follow(self._lessons.known)
        if step.is_measured:
            step.diary.note_saved(activation.index, self.tier)
        if step.choice is None:
            if activation.is_loose:
                step.loose.append((ref(activation), place))
            else:
                for ready in step.line_up(activation):
                    self._send_within_quota(step, ready)
        elif activation.index in step.choice.moved and step.is_complete(activation):
            if activation.is_loose:
                step.loose.append((ref(activation), place))
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
                ready = [activation] if running is None else step.line_up(activation)
                for leaving in ready:
                    self._send_within_quota(step, leaving)
            elif running is None:
                step.diary.stays.add(activation.index)
            else:
                later.append((weak, place))
        step.loose = later

    def _send_within_quota(self, step: Step, activation: Activation) -> None:
        """In an unknown step: send an activation if enough stayed before it."""
        quota = self._lessons.usual_quota
        step.seen += activation.nbytes
        limit = round(quota * step.seen) if isinstance(quota, float) else quota
        if step.sent + activation.nbytes <= limit:
            self._send(activation)

    def _send(self, activation: Activation) -> None:
        if self._leaving.send(activation):
            activation.step.sent += activation.nbytes
            self._count(tensors_out=1, bytes_out=activation.nbytes)

    def _stay_below_ceiling(self, step: Step) -> None:
        """Have the device wait for copies until no more activations are there than should be."""
        if step.choice is None:
            while self._leaving and self._leaving.nbytes > step.lead:
                self._leaving.release_first(step)
        else:
            ceilings, last = step.choice.ceilings, len(step.sizes) - 1
            ceiling = ceilings[last] if last < len(ceilings) else step.choice.ceiling
            while self._leaving and step.here > ceiling:
                self._leaving.release_first(step)

    def _release_all(self) -> None:
        while self._leaving:
            self._leaving.release_first(self._step)

    def _note_backward(self, step: Step, activation: Activation) -> None:
        """A backward uses a step: perhaps its first use, perhaps another backward than before."""
        if not step.has_turned:
            self._turn(step)
        task = graph_task_id()
        if task == -1:
            return
        backward = self._backwards.get(task)
        if backward is None:
            backward = _Backward(self, task)
            empty_when_backward_ends(backward)
            self._backwards[task] = backward
        if step not in backward.steps:
            backward.steps.add(step)
            step.restart(activation.index)

    def _turn(self, step: Step) -> None:
        self._send_loose(step)
        if self.tier.waits_on_device:
            self._release_all()
        if step.is_measured:
            step.set_memory_aside = self.tier.growth() != step.growth
        step.turn(self._lessons.known)

    def forget(self, task: int) -> None:
        """A backward has ended."""
        self._backwards.pop(task, None)

    def _bring_back(self, step: Step, activation: Activation) -> Tensor:
        """The bytes of an activation that is away, and on the way what is wanted after it."""
        self._count(**{"prefetch_hits" if activation.is_coming else "prefetch_misses": 1})
        if not activation.is_coming:
            self._fetch(activation)
        self._fetch_wanted(step)
        assert activation.copy is not None, "what is away has a copy"
        self._note_coming(activation)
        try:
            with self._waits.measured(step):
                data = activation.copy.take()
        except OSError as error:
            raise OffloadError(
                f"An activation of {format_bytes(activation.nbytes)} could not be read back from "
                f"{self._options.directory!r}: {error}. Without it this backward cannot be done; "
                "run the step again, on a disk that can be read."
            ) from error
        activation.is_coming = False
        return data

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
            activation.count(here=True)
            self._count(tensors_in=1, bytes_in=activation.nbytes)
            if self.tier.fetches_in_stages:
                activation.step.coming.append(ref(activation))

    def _fetch_wanted(self, step: Step) -> None:
        """Begin to bring back what backward uses next, as much as may be there at a time."""
        assert step.choice is not None, "it is made when backward begins, at the latest"
        coming = [activation for weak in step.coming if (activation := weak()) is not None]
        step.coming = [ref(activation) for activation in coming if activation.is_coming]
        for activation in coming:
            if activation.is_coming:
                self._fetch(activation)
        while step.wanted:
            wanted = step.activations[step.wanted[0]]()
            if wanted is not None and not wanted.stay() and wanted.is_wanted():
                if step.here + wanted.nbytes > step.choice.ceiling:
                    return
                if not self._fetch(wanted):
                    return
            step.wanted.popleft()

    def _count(self, **counts: int) -> None:
        for seen in observation.active:
            seen.traffic(self._options.tier).add(self.tier.pool_bytes, **counts)


class _Backward:
    """One run of backward, and the steps it uses: emptied when it ends, however it ends."""

    def __init__(self, lane: Lane, task: int) -> None:
        self._lane = lane
        self._task = task
        self.steps: set[Step] = set()

    def empty(self) -> None:
        self._lane.forget(self._task)
        self._lane.empty(self.steps)


def _can_stand_for(activation: Activation, x: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether an activation of the same storage can stand for this tensor too.

    One that is made again stands for what its op made, and needs the op's inputs unchanged, which a
    detached tensor does not.
    """
    if activation.made_from is not None:
        return activation.is_known(x) and is_made_by_its_node(x)
    return activation.nbytes == storage.nbytes()


def _place() -> Place:
    """Which op saves just now: on what thread, and how many autograd had followed there by then."""
    return get_ident(), nodes_so_far()
