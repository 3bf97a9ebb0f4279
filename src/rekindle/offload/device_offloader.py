"""The offloader of one device, for one owner: what is done with each activation that is saved.

`save` takes a tensor that autograd saves, and `load` gives backward its bytes. Between the two an
activation goes through the states of `residency.Residency`. `CopyOutScheduler` decides when a
copy-out begins, `Prefetcher` copies back, and `LearnedSteps` remembers what earlier steps did.
Bytes that backward asks for before they were prefetched, and bytes that are derived, come on top of
the ceiling that the schedule sets.
"""

from collections import deque
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rekindle.offload.activation import Activation, as_bytes
from rekindle.offload.copy_out_scheduler import CopyOutScheduler
from rekindle.offload.derive import Derivation, derivation_of, is_made_by_its_node
from rekindle.offload.learned_steps import LearnedSteps
from rekindle.offload.prefetcher import Prefetcher
from rekindle.offload.residency import RETURNED, RETURNING
from rekindle.offload.saved_tensors import KeptTensor, OffloadedTensor
from rekindle.offload.step_activations import OpPosition, StepActivations
from rekindle.offload.traffic_counter import TrafficCounter
from rekindle.regions.backward_cleanup import empty_when_backward_ends
from rekindle.torch_private.autograd_graph import graph_task_id, nodes_so_far
from rekindle.torch_private.dispatch_modes import below_modes
from rekindle.torch_private.storages import storage_key

if TYPE_CHECKING:
    from rekindle.offload.tiers.base import Tier
    from rekindle.strategy import Offload


class DeviceOffloader:
    """Copies the activations of one device out and back, by one strategy and for one owner."""

    def __init__(
        self,
        device: torch.device,
        strategy: "Offload",
        tier: "Tier",
        limit_in_flight: bool = True,
    ) -> None:
        self.device = device
        self.tier = tier
        self.dead: deque[tuple[StepActivations, int]] = deque()
        """Steps of activations that died, with the bytes that `_process_finished` subtracts."""
        self._derives = strategy.derive
        self._lock = RLock()
        self._step: StepActivations | None = None
        """The step whose activations are being saved, or were saved last."""
        self._past: list[StepActivations] = []
        """Steps whose backward has begun and whose activations are not all dead."""
        self._learned = LearnedSteps(strategy.quota, tier, limit_in_flight)
        self._traffic = TrafficCounter(tier, strategy.tier)
        self._copy_outs = CopyOutScheduler(tier, strategy, self._learned, self._traffic)
        self._prefetcher = Prefetcher(tier, strategy, self._traffic)
        self._backwards: dict[int, _Backward] = {}

    def save(self, x: Tensor, exclusive: bool = False) -> OffloadedTensor:
        """Take a tensor that autograd saves.

        `exclusive`: no one but autograd holds it, now or later.
        """
        op = _current_op()
        with self._lock, below_modes():
            try:
                self._process_finished()
                step = self._open_step()
                if step.owner_unknown:
                    self._copy_outs.schedule_owner_unknown(step, running=op)
                storage = x.untyped_storage()
                known = step.by_storage.get(storage_key(storage))
                activation = known() if known else None
                if activation is None or not _can_stand_for(activation, x, storage):
                    activation = self._add(step, x, storage, op, exclusive)
                elif not activation.is_known(x):
                    self._copy_again(step, activation, x, storage, op)
                return OffloadedTensor(activation, x)
            except BaseException as error:
                self._note_failure(error, self._step)
                raise

    def load(self, activation: Activation) -> Tensor:
        """Returns the bytes of an activation that backward uses, on the device."""
        with self._lock, below_modes():
            try:
                return self._load(activation.step, activation)
            except BaseException as error:
                self._note_failure(error, activation.step)
                raise

    def _load(self, step: StepActivations, activation: Activation) -> Tensor:
        self._process_finished()
        self._register_backward(step, activation)
        if activation.derivation is None:
            step.record.note_used(activation.index, self.tier if step.is_measured else None)
            step.note_use(activation.index)
        data = activation.data
        if data is not None:
            if activation.residency is RETURNED:
                self.tier.join(data, activation.returned_on)
            self._prefetcher.prefetch(step)
            return data
        storage = activation.storage_held_elsewhere()
        if storage is not None:
            if activation.derivation is None:
                step.record.stays.add(activation.index)
            return as_bytes(storage, self.device)
        if activation.derivation is not None:
            made = activation.derivation.make(
                "derive=False keeps that one, or copies it out, instead."
            )
            data = as_bytes(made.untyped_storage(), self.device)
        else:
            data = self._prefetcher.bring_back(step, activation)
        returned_on = self.tier.current_stream()
        activation.returned_on = returned_on
        activation.arrive(data)
        return data

    def _note_failure(self, error: BaseException, step: StepActivations | None) -> None:
        """After an interrupt, which may leave a step's bookkeeping half done, begin a new step.

        What was saved stays readable: an activation and its step need nothing else of this object.
        """
        if step is not None and not isinstance(error, Exception):
            step.interrupted = True
            if self._step is step:
                self._step = None

    def pause(self, failed: bool) -> None:
        """End a `with` block or a region: begin the copy-outs that waited for their owner."""
        with self._lock, below_modes():
            try:
                self._pause(failed)
            except BaseException as error:
                self._note_failure(error, self._step)
                raise

    def _pause(self, failed: bool) -> None:
        if failed:  # release what was copied out; an error is being raised already
            if self.tier.waits_on_device:
                self._copy_outs.end_all(None)
            return
        self._process_finished()
        step = self._step
        if step is None or step.backward_started:
            return
        self._copy_outs.schedule_owner_unknown(step)
        if self.tier.waits_on_device and step.schedule is None:
            self._copy_outs.end_all(step)

    def on_backward_begin(self) -> None:
        """Begin the last copy-outs: backward begins, though it may use an activation only later."""
        with self._lock, below_modes():
            self._process_finished()
            step = self._step
            if step is not None and step.sizes and not step.backward_started:
                self._begin_backward_of(step)

    def end_backward(self, task: int, steps: "set[StepActivations]") -> None:
        """Evict what came back in a backward that has ended; the copies stay."""
        self._backwards.pop(task, None)
        with self._lock:
            for step in steps:
                for weak in [*step.activations, *step.derived]:
                    activation = weak()
                    if activation is None:
                        continue
                    if activation.residency is RETURNING:  # for a backward to come, perhaps
                        step.to_prefetch.append(activation.index)
                    activation.evict()

    def trim(self) -> None:
        """Give back the memory, or the disk, that no activation uses."""
        with self._lock:
            self._process_finished()
            self.tier.trim()

    def _process_finished(self) -> None:
        """Process the copy-outs that ended, and the activations that died, since the last call."""
        self._copy_outs.queue.end_finished()
        while self.dead:
            step, nbytes = self.dead[0]
            step.alive -= 1
            step.device_bytes -= nbytes
            self.dead.popleft()

    def _open_step(self) -> StepActivations:
        """Returns the step that is being saved, or begins one: Note [What a step is]."""
        step = self._step
        if step is None or step.backward_started or (step.sizes and not step.alive):
            seen = [*self._past, *([step] if step is not None and step.backward_started else [])]
            self._past = [past for past in seen if past.alive]
            self._step = None
            for past in seen:
                if not (past.alive or past.interrupted):
                    self._learned.learn(past)
            step = self._step = self._learned.next_step()
        return step

    def _add(
        self,
        step: StepActivations,
        x: Tensor,
        storage: torch.UntypedStorage,
        op: OpPosition,
        exclusive: bool,
    ) -> Activation:
        """Make an activation of a storage that was not saved in this step yet."""
        activation = Activation(self, step, x, storage, exclusive)
        derivation = derivation_of(x, storage, self._may_derive_from) if self._derives else None
        if derivation is not None and self._is_trusted(step, derivation, activation):
            activation.derive(derivation)
            self._traffic.add(tensors_derived=1, bytes_derived=activation.nbytes)
        step.add(activation, storage_key(storage))
        if activation.derivation is None:
            self._copy_outs.schedule(step, activation, op)
        return activation

    def _copy_again(
        self,
        step: StepActivations,
        activation: Activation,
        x: Tensor,
        storage: torch.UntypedStorage,
        op: OpPosition,
    ) -> None:
        """Have no copy but one that is begun from now on: Note [What a copy stands for]."""
        activation.note_written(x)
        step.writes[activation.index] = activation.writes
        if activation.copy is not None:
            activation.reread(storage)
            step.copied_bytes -= activation.nbytes
            step.offered_bytes -= activation.nbytes
        elif step.schedule is None:
            return  # it leaves when enough was saved after it, or stays
        activation.saved_on = self.tier.current_stream()
        self._copy_outs.schedule(step, activation, op)

    def _may_derive_from(self, saved: Any) -> bool:
        """True if an activation may be derived from this saved tensor.

        Not from another offloader's: two that ask each other could wait for each other for ever.
        """
        is_own = isinstance(saved, OffloadedTensor) and saved.activation.offloader is self
        return is_own or isinstance(saved, KeptTensor)

    def _is_trusted(
        self, step: StepActivations, derivation: Derivation, activation: Activation
    ) -> bool:
        """True if the bits will be the same: Note [When a node can be trusted]."""
        key = step.derivable_count, derivation.name, activation.nbytes
        step.derivable_count += 1
        assert activation.data is not None, "it was just saved"
        if step.profile is not None:
            is_trusted = key in step.profile.derived
        else:
            is_trusted = derivation.gives(activation.data)
        if is_trusted:
            step.derived_keys.add(key)
        return is_trusted

    def _register_backward(self, step: StepActivations, activation: Activation) -> None:
        """Register the backward that runs now with a step that it uses, if it is not yet."""
        if not step.backward_started:
            self._begin_backward_of(step)
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
            step.rewind_to(activation.index)

    def _begin_backward_of(self, step: StepActivations) -> None:
        """Begin the last copy-outs of a step and fix its schedule: a backward uses it."""
        self._copy_outs.schedule_owner_unknown(step)
        if self.tier.waits_on_device:
            self._copy_outs.end_all(self._step)
        if step.is_measured:
            step.grew_memory = self.tier.growth() != step.tier_growth
        step.fix_schedule(self._learned.known)


class _Backward:
    """One run of backward, and the steps that it uses; at its end what came back is evicted."""

    def __init__(self, offloader: DeviceOffloader, task: int) -> None:
        self._offloader = offloader
        self._task = task
        self.steps: set[StepActivations] = set()

    def empty(self) -> None:
        self._offloader.end_backward(self._task, self.steps)


def _can_stand_for(activation: Activation, x: Tensor, storage: torch.UntypedStorage) -> bool:
    """True if an activation of the same storage can stand for this tensor too.

    A derived one stands for the result of its op, and needs the op's inputs unchanged, which a
    detached tensor does not.
    """
    if activation.derivation is not None:
        return activation.is_known(x) and is_made_by_its_node(x)
    return activation.nbytes == storage.nbytes()


def _current_op() -> OpPosition:
    """Returns the op that saves just now: its thread, and how many nodes autograd made there."""
    return get_ident(), nodes_so_far()
